"""
Client of the spawner, which is started with the driver and again when needed after it has died.

The spawner outlives this process if instances do (`spawner.py`). An instance whose start was
cancelled before the spawner reported it is killed once it is reported.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from atoll.drivers.local import spawner
from atoll.drivers.shared import processes, subprogram
from atoll.errors import InstanceNotStarted

if TYPE_CHECKING:
    from datetime import timedelta

log = structlog.get_logger(__name__)


class DataDirectory(NamedTuple):
    """The data directory to which a spawner's instances belong."""

    directory: str
    locks: list[str]
    """Files that servers of the data directory lock as long as they live."""
    limit: float
    """Seconds that instances may run without a server."""
    mark: str
    """Value of `sandbox_start.OWNER`, by which processes of its instances are found."""


@dataclass(frozen=True)
class ForkServer:
    """The warm interpreter of which instances are forks (`executor/fork_server.py`)."""

    argv: list[str]
    files: list[str]
    """Its root file system, as options of bubblewrap."""
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class SpawnRequest:
    """How the spawner starts a sandbox. Sent as JSON."""

    instance: str
    argv: list[str]
    """The command of bubblewrap."""
    fork_server: ForkServer | None = None
    """
    If set, the instance becomes a fork, if this machine can do that: its sandbox is made as `argv`
    says, but not by bubblewrap.
    """
    directory: str
    """The instance's directory, in which the socket of the executor is made."""
    log: str | None = None
    """A named pipe for the output; without one, its end is reported with the exit."""
    seccomp: str | None = None
    """The file of the system call filter."""
    groups: list[str]
    """Files to which bubblewrap's pid is written to enter its control groups."""
    uid: int | None = None
    """The host uid of the sandbox; the spawner's own if not set."""
    rlimits: dict[str, int]
    stage: str | None = None
    """The directory below which the sources of mounts are bound, if there is a `uid`."""
    binds: list[tuple[str, str]]
    """Paths of the host, and their names in the stage."""
    layers: list[str] = field(default_factory=list)
    """Directories that are mounted as one root file system in the stage, the highest first."""
    mounts: str = ""
    """A directory whose mounts are unmounted in the sandbox's namespace."""
    image: str | None = None
    """The file system image that is mounted as `workspace` in the stage."""
    owner: int | None = None
    """The uid that owns the files in the image, if that is not `uid`."""
    callback: str | None = None
    """The file with the executor's callback address and token."""
    journal: list[str] = field(default_factory=list)
    """The two files of the executor's journal."""
    ephemeral: bool
    """Whether the sandbox ends with the server."""


class Exit(NamedTuple):
    status: int
    """Wait status of the main process."""
    printed: str
    """The end of the output of bubblewrap and the executor."""


_outliving: set[int] = set()
"""Pids of spawners that stay with instances after `close`; to be reaped."""


def _reap() -> None:
    for pid in list(_outliving):
        try:
            ended = os.waitpid(pid, os.WNOHANG)[0] == pid
        except ChildProcessError:
            ended = True
        if ended:
            _outliving.discard(pid)


class SpawnerClient:
    def __init__(self, start_timeout: timedelta, data_directory: DataDirectory) -> None:
        self._start_timeout = start_timeout
        self._data_directory = data_directory
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._sending = asyncio.Lock()
        self._closed = asyncio.Event()
        self._outlives = False
        """Whether the spawner stays with instances for the next server."""
        self._last = 0
        self.exits: dict[int, Exit] = {}
        """Exits by the pid of the main process; callers remove those that they have read."""

    def open(self) -> None:
        _reap()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * spawner.MAX_MESSAGE)
        with theirs:
            self._process = subprocess.Popen(
                [
                    *subprogram.command(spawner),
                    str(theirs.fileno()),
                    str(os.getpid()),
                    json.dumps(self._data_directory._asdict()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Its own session: Ctrl-C in the terminal must not reach it.
                start_new_session=True,
                cwd="/",
            )
        ours.setblocking(False)
        self._socket = ours
        self._closed.clear()
        self._outlives = False
        asyncio.get_running_loop().add_reader(ours, self._receive)

    async def close(self) -> None:
        """Wait until the ephemeral instances have ended, and the spawner unless it stays."""
        if self._process is None:
            return
        if self._socket is not None:
            self._fail_waiting()
            self._socket.shutdown(socket.SHUT_WR)
            try:
                async with asyncio.timeout(self._start_timeout.total_seconds()):
                    await self._closed.wait()
            except TimeoutError:
                log.warning("spawner.not_closed", pid=self._process.pid)
                self._outlives = True
                self._lost()
        if not self._outlives:
            try:
                seconds = self._start_timeout.total_seconds()
                await asyncio.to_thread(self._process.wait, seconds)
            except subprocess.TimeoutExpired:
                log.warning("spawner.not_ended", pid=self._process.pid)
        if self._process.poll() is None:
            _outliving.add(self._process.pid)
            # Otherwise Python warns at exit that the process still runs.
            self._process.returncode = 0

    def has(self, pid: int) -> bool:
        """Whether the exit of a main process that was started here has yet to be reported."""
        # The process itself disappears a moment before its exit is reported.
        return self._socket is not None and pid not in self.exits

    async def prepare(
        self, fork_server: ForkServer | None = None, stage: str = "", uid: int = 0
    ) -> None:
        """
        Start the spawner and its fork server now: the first instance need not wait for them. What
        the machine allows is tried in `stage` as `uid`.
        """
        try:
            if fork_server is None:
                self.open()
            else:
                request = {"fork_server": fork_server, "stage": stage, "uid": uid}
                await self._send({"prepare": request})
        except OSError as error:
            # The first instance tries again.
            log.warning("spawner.not_started", error=str(error))

    async def spawn(self, request: SpawnRequest) -> tuple[int, int]:
        """
        Start a sandbox; returns the host pids of its main process and of its PID 1. The main
        process is bubblewrap, or PID 1 itself for a fork.
        """
        self._last += 1
        number = self._last
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._start_timeout.total_seconds()):
                await self._send({**vars(request), "number": number})
                answer = await future
        except TimeoutError:
            seconds = self._start_timeout.total_seconds()
            answer = {"error": f"the spawner did not answer within {seconds:g} s"}
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise InstanceNotStarted(
                f"Instance {request.instance} could not be started: {answer['error']}.",
            )
        return answer["pid"], answer["child"]

    async def _send(self, message: dict[str, Any]) -> None:
        # The event loop supports one writer for a socket: a second would replace the first.
        async with self._sending:
            if self._socket is None:
                self.open()
            assert self._socket is not None
            data = json.dumps(message, default=vars).encode()
            await asyncio.get_running_loop().sock_sendall(self._socket, data)

    def _receive(self) -> None:
        assert self._socket is not None
        while self._socket is not None:
            try:
                message = self._socket.recv(spawner.MAX_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._lost()
                return
            answer = json.loads(message)
            if "outlives" in answer:
                self._outlives = True
            elif "not_forked" in answer:
                log.warning("instances.not_forked", reason=answer["not_forked"])
            elif "exited" in answer:
                self.exits[answer["exited"]] = Exit(answer["status"], answer["printed"])
            elif (future := self._waiting.get(answer["number"])) and not future.done():
                future.set_result(answer)
            elif "pid" in answer:
                for pid in (answer["child"], answer["pid"]):
                    processes.kill(pid, processes.start_time(pid) or 0)

    def _lost(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        self._closed.set()
        self._fail_waiting()

    def _fail_waiting(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_result({"error": "the spawner ended"})
