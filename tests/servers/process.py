"""
The common part of the database servers of the tests: one process and its children.

Its data is in a directory with a short path, because the path of a socket is limited to 107 bytes
and because, started by root, the server runs as another user, who must be able to reach it. The log
is in the directory of the test. The port stays the same over restarts.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Self

from tests.servers import free_port, until_ready
from tests.standstill import go_on, stand_still

ROOT = os.geteuid() == 0
NOBODY = 65534
# Ends the server and removes its data when the tests are killed: then the pipe to it is closed.
GUARD = """
read -r _
kill -KILL "$1" $(cat "/proc/$1/task/$1/children")
rm -rf "$2"
"""
USER, PASSWORD = "atoll", "atoll-password"


class TLS(NamedTuple):
    """Files in PEM for the server to use; with them it takes no plain connection over TCP."""

    certificate: Path
    key: Path
    authority: Path


class DatabaseServer(ABC):
    """
    A new server has an empty database `atoll`; committed data survives `kill`. `host` is
    where it listens.
    """

    scheme: str
    stop_signal: signal.Signals

    def __init__(self, directory: Path, *, tls: TLS | None = None, host: str = "127.0.0.1") -> None:
        self.log = directory / f"{self.scheme}.log"
        self.host = host
        self.port = free_port()
        self.place = Path(tempfile.mkdtemp(prefix="atoll-db-"))
        self.process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._databases = 1
        self._prepared = False
        self.tls = tls and TLS(*(Path(shutil.copy(path, self.place)) for path in tls))
        for path in (self.place, *(self.tls or ())):
            path.chmod(0o700 if path.is_dir() else 0o600)
            if ROOT:
                os.chown(path, NOBODY, NOBODY)

    @property
    def url(self) -> str:
        return self.url_of("atoll")

    def url_of(self, database: str) -> str:
        return f"{self.scheme}://{USER}:{PASSWORD}@{self.host}:{self.port}/{database}"

    def new_database(self) -> str:
        """The address of another empty database."""
        self._databases += 1
        name = f"atoll_{self._databases}"
        self._create_database(name)
        return self.url_of(name)

    def start(self) -> Self:
        assert self.process is None, "it runs already"
        with self.log.open("ab") as log:
            if not self._prepared:
                self._prepare(log.fileno())
            self.process = self._spawn(self._command(), log.fileno())
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "sh", str(self.process.pid), str(self.place)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until_ready(self._ready, self.process, self.log)
        if not self._prepared:
            self._create_user()
            self._create_database("atoll")
            self._prepared = True
        return self

    def stop(self) -> None:
        """Let it end as it should, and wait for that."""
        self.resume()
        self._running.send_signal(self.stop_signal)
        self._running.wait(60)
        self._ended()

    def kill(self) -> None:
        """Kill it with all its processes, and wait for their end."""
        self.pause()
        with ExitStack() as stack:
            # Held by descriptor: only their parent, which dies too, can wait for them.
            children = [stack.enter_context(_descriptor(pid)) for pid in self._children()]
            self._running.kill()
            for child in children:
                # A process that had ended may disappear with its parent.
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(child, signal.SIGKILL)
            self._running.wait(60)
            for child in children:
                assert select.select([child], [], [], 60)[0], "a process of the server stays"
        self._ended()

    def pause(self) -> None:
        """It stays connected and connections are taken, but it answers nothing."""
        # The parent first, lest it starts another while they are listed.
        stand_still(self._running.pid)
        for pid in self._children():
            with suppress(ProcessLookupError):
                stand_still(pid)

    def resume(self) -> None:
        for pid in (*self._children(), self._running.pid):
            with suppress(ProcessLookupError):
                go_on(pid)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            self.kill()
        self._tidy()
        shutil.rmtree(self.place)

    @abstractmethod
    def _prepare(self, log: int) -> None:
        """Make the data directory."""

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _ready(self) -> bool: ...

    @abstractmethod
    def _create_user(self) -> None: ...

    @abstractmethod
    def _create_database(self, name: str) -> None: ...

    def _tidy(self) -> None:  # noqa: B027
        """Release what a killed server could not."""

    def _spawn(self, command: list[str], log: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            cwd=self.place,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # A Ctrl-C in the terminal is for the tests, which then end it.
            start_new_session=True,
            user=NOBODY if ROOT else None,
            group=NOBODY if ROOT else None,
            extra_groups=[] if ROOT else None,
        )

    def _run(self, command: list[str], log: int) -> None:
        if self._spawn(command, log).wait(120) != 0:
            raise AssertionError(f"{command[0]} failed: {self.log.read_text()[-4000:]}")

    def _ended(self) -> None:
        self.process = None
        if self._guard is not None:
            with self._guard:
                self._guard.kill()
            self._guard = None

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        assert self.process is not None, "it does not run"
        return self.process

    def _children(self) -> list[int]:
        pid = self._running.pid
        try:
            return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except FileNotFoundError:
            return []  # It exited.


@contextmanager
def _descriptor(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
