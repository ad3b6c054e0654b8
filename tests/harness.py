"""Real processes of Atoll for tests to talk to."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx

from tests import drivers, preloaded
from tests.preloaded import Forked

ADDRESS = re.compile(r"listens on (\S+)")


class Server:
    """`atoll serve` on a free port with its own data directory; killed and started on request."""

    prefix: tuple[str, ...] = ()
    """A command that executes the server, such as one that drops privileges."""
    preloaded = True
    """Whether it may be a fork (`tests.preloaded`), which it is not with a `prefix`."""

    def __init__(self, data_dir: Path, *arguments: str, **env: str) -> None:
        self._constants: dict[str, float] = {}
        self.data_dir = data_dir
        self._arguments = arguments
        self._env = env
        self.log_path = data_dir / "server.log"
        self.url = ""
        self.process: subprocess.Popen[str] | Forked | None = None

    def with_constants(self, values: Mapping[str, float]) -> Self:
        """
        Other values for constants of Atoll, by module and name, when it is started next; seconds
        for a `timedelta`.
        """
        assert self.preloaded
        assert not self.prefix
        self._constants |= values
        return self

    def start(self) -> Self:
        arguments = ["serve", "--port", "0", "--data-dir", str(self.data_dir), *self._arguments]
        env = {**os.environ, **drivers.settings_of(self.data_dir), **self._env}
        with self.log_path.open("a") as log:
            if self.preloaded and not self.prefix:
                self.process = preloaded.start(
                    arguments, env, log.fileno(), constants=self._constants
                )
            else:
                self.process = subprocess.Popen(
                    [*self.prefix, sys.executable, "-m", "atoll.cli", *arguments],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=env,
                )
        try:
            self.url = self._address()
            if drivers.cluster is not None:
                drivers.cluster.wait_for_template(self)
        except BaseException:
            self.stop(signal.SIGKILL)
            raise
        return self

    def _address(self) -> str:
        """Where it listens, as soon as it does."""
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = ADDRESS.search(line)
            if found:
                return found[1]
        raise AssertionError(f"the server did not start: {self.stderr()}")

    def stderr(self) -> str:
        return self.log_path.read_text()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it, and wait for that; its exit code."""
        process = self.process
        assert process is not None
        assert process.stdout is not None
        process.send_signal(number)
        try:
            return process.wait(60)
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            process.stdout.close()
            self.process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.stop()
        # What it left running on purpose ends now: a last start that ends for good.
        if drivers.instances(self.data_dir):
            last = type(self)(self.data_dir, "--stop-sessions", **self._env).start()
            assert last.stop() == 0

    @property
    def key(self) -> str:
        return (self.data_dir / "key").read_text().strip()

    def atoll(
        self, *arguments: str, input: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as a client of this server."""
        login = {"ATOLL_URL": self.url, "ATOLL_API_KEY": self.key}
        return preloaded.run(*arguments, env=login | env, input=input)

    def client(self, **options: Any) -> httpx.Client:
        """An authenticated client of the REST API."""
        headers = {"Authorization": f"Bearer {self.key}"}
        # It speaks plain HTTP: to read all certificates that this machine trusts takes 25 ms.
        given = {"verify": False, "timeout": 60} | options
        return httpx.Client(base_url=self.url, headers=headers, **given)
