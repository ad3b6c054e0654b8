"""Real processes of Atoll for tests to talk to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import httpx

ADDRESS = re.compile(r"listens on (\S+)")


class Server:
    """`atoll serve` on a free port with a data directory of its own; killed and started at will."""

    prefix: tuple[str, ...] = ()
    """A command that becomes the server, such as one that takes rights from it."""

    def __init__(self, data_dir: Path, *arguments: str, **env: str) -> None:
        self.data_dir = data_dir
        self._arguments = arguments
        self._env = env
        self.log_path = data_dir / "server.log"
        self.url = ""
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Self:
        self.log = self.log_path.open("a")
        self.process = subprocess.Popen(
            [
                *self.prefix, sys.executable, "-m", "atoll.cli", "serve", "--port", "0",
                "--data-dir", str(self.data_dir), *self._arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **self._env},
        )  # fmt: skip
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = ADDRESS.search(line)
            if found:
                self.url = found[1]
                return self
        raise AssertionError(f"the server did not start: {self.stderr()}")

    def stderr(self) -> str:
        return self.log_path.read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it, and wait for that; its exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.log.close()
        self.process = None
        return code

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.stop()
        # What it left running on purpose ends now: a last start that ends for good.
        instances = self.data_dir / "node" / "instances"
        if instances.is_dir() and any(instances.iterdir()):
            last = type(self)(self.data_dir, "--stop-sessions", **self._env).start()
            assert last.stop() == 0

    @property
    def key(self) -> str:
        return (self.data_dir / "key").read_text().strip()

    def client(self, **options: Any) -> httpx.Client:
        """An authenticated client of the REST API."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, **options)
