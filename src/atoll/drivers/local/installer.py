"""
Installations on this machine: each in a sandbox of its own, which can write to one directory and
connect to one socket.

Its directory is made before it starts and removed after it has ended; the result is moved away
before. An installation ends with the process that started it, and the next process that opens the
node removes what a killed one has left. Memory, CPU and processes are limited like an instance's.
Files are written to a file system image, where the node has images; otherwise their size is watched
while the installation runs, and a fast writer can exceed the limit for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from typing import TYPE_CHECKING, Any

import structlog

from atoll.drivers.local import sandbox
from atoll.drivers.local.spawner_client import SpawnRequest
from atoll.drivers.shared import cgroups, processes
from atoll.drivers.shared.disk_images import MIN_IMAGE, make_file_system, wait_until_detached
from atoll.drivers.shared.file_trees import remove_tree
from atoll.drivers.shared.packages import install_program
from atoll.drivers.shared.packages.install_results import (
    ANSWER_LIMIT,
    ENDED,
    TOO_LONG,
    InstallFailed,
    decoded,
)
from atoll.drivers.shared.packages.installation import (
    InstallOutput,
    is_abandoned,
    record_owner,
    start_errors,
    wait_until_too_large,
)
from atoll.drivers.shared.uids import new_uid, uid_range
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from atoll.drivers.base import ConnectionHandler
    from atoll.drivers.local.sandbox_host import SandboxHost
    from atoll.drivers.local.spawner_client import SpawnerClient
    from atoll.model.resources import Resources
    from atoll.settings import LocalSettings

CONNECT_TIMEOUT = 30.0
KILL_TIMEOUT = 10.0
MAX_FINAL_READS = 16
"""Reads of the log after the end: more than the pipe can hold."""

log = structlog.get_logger(__name__)


class Installer:
    def __init__(
        self,
        directory: Path,
        host: SandboxHost,
        spawner: SpawnerClient,
        uv: str,
        settings: LocalSettings,
        images: bool,
    ) -> None:
        """Installations write to file system images if there are `images`."""
        self._root = directory
        self._host = host
        self._spawner = spawner
        self._uv = uv
        self._settings = settings
        self._images = images

    def open(self) -> None:
        """Remove what processes that have ended left."""
        self._root.mkdir(exist_ok=True, mode=0o700)
        for entry in list(os.scandir(self._root)):
            if is_abandoned(self._root / entry.name):
                self._clear(entry.name)

    @contextlib.asynccontextmanager
    async def run(
        self,
        tree: sandbox.RootFileSystem,
        order: dict[str, Any],
        *,
        resources: Resources,
        handler: ConnectionHandler | None,
        on_output: Callable[[bytes], None],
    ) -> AsyncIterator[InstallOutput]:
        """
        Run an order with `install_program`. The output is removed at the end of the block.
        `handler` serves the socket that the sandbox can connect to.
        """
        name = f"install_{secrets.token_hex(10)}"
        uid = new_uid(uid_range(self._settings)) if self._host.staged else None
        directory = self._root / name
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._end, name)
            with start_errors():
                await asyncio.to_thread(self._prepare, name, uid, resources)
            if handler is not None:
                stack.push_async_callback(_close, await self._serve(directory, handler))
            stack.callback(LogPipe(directory / "log", on_output).close)
            # A process that is being started cannot be cancelled.
            starting = asyncio.ensure_future(
                self._spawner.spawn(self._request(name, tree, uid, served=handler is not None))
            )
            stack.push_async_callback(self._kill, starting)
            pids = await asyncio.shield(starting)
            watching = None
            if not self._images:
                build = directory / "build"
                watching = asyncio.create_task(self._watch_size(build, resources.disk, pids))
                stack.push_async_callback(_cancel, watching)
            await asyncio.to_thread(self._host.groups.confine, name, pids[1])
            order = {**order, "python": tree.python, "limits": self._limits(resources)}
            try:
                answered = await self._ask(directory, order)
            except InstallFailed:
                if watching is not None and watching.done():
                    watching.result()  # Raises the reason.
                raise
            await self._kill(starting)
            image = directory / "disk" if self._images else None
            if image is not None:
                await asyncio.to_thread(wait_until_detached, image, "instance_stuck")
            yield InstallOutput(answered, directory, directory / "build", image, tree.python)

    def _limits(self, resources: Resources) -> dict[str, int]:
        limits = {"FSIZE": resources.disk}
        if "cgroup_memory" not in self._host.groups.provides:
            limits["DATA"] = resources.memory
        if "cgroup_pids" not in self._host.groups.provides:
            limits["NPROC"] = resources.max_processes
        return limits

    def _prepare(self, name: str, uid: int | None, resources: Resources) -> None:
        directory = self._root / name
        directory.mkdir(mode=0o700)
        record_owner(directory)
        os.mkfifo(directory / "log", 0o600)
        (directory / "build").mkdir(mode=0o700)
        if self._images:
            make_file_system(directory / "disk", max(resources.disk, MIN_IMAGE))
        elif uid is not None:
            os.chown(directory / "build", uid, uid)
        self._host.groups.make(name, resources)

    async def _serve(self, directory: Path, handler: ConnectionHandler) -> asyncio.Server:
        fd = os.open(directory, os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Through the descriptor: the path may be too long for a socket's address.
            server = await asyncio.start_unix_server(
                handler, f"/proc/self/fd/{fd}/gateway.sock", limit=64 * 1024
            )
        finally:
            os.close(fd)
        # Its directory is private: only the sandbox that has it bound can connect.
        (directory / "gateway.sock").chmod(0o666)
        return server

    def _request(
        self, name: str, tree: sandbox.RootFileSystem, uid: int | None, *, served: bool
    ) -> SpawnRequest:
        host, directory = self._host, self._root / name
        build = str(directory / "build")
        image = str(directory / "disk") if self._images else None
        sources = host.sources(tree, build, image)
        box = sandbox.Installation(
            tree=tree,
            program=install_program.__file__,
            uv=self._uv,
            gateway=str(directory / "gateway.sock") if served else None,
            build=build,
            hidden=host.hidden,
            tmp_size=self._settings.tmp_size,
            seccomp=host.seccomp is not None,
        )
        return SpawnRequest(
            instance=name,
            argv=sandbox.installation_arguments(host.bubblewrap, box, sources),
            directory=str(directory),
            log=str(directory / "log"),
            seccomp=None if host.seccomp is None else str(host.seccomp),
            groups=host.groups.join_files(name),
            uid=uid,
            rlimits={
                "CORE": 0,
                "NOFILE": self._settings.open_files,
                "MEMLOCK": 65_536,
                "MSGQUEUE": 819_200,
            },
            stage=sources.stage,
            binds=list(sources.binds.items()),
            layers=list(tree.layers),
            mounts=host.mounts,
            image=image,
            ephemeral=True,
        )

    async def _ask(self, directory: Path, order: dict[str, Any]) -> dict[str, Any]:
        fd = os.open(directory, os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                reader, writer = await asyncio.open_unix_connection(f"/proc/self/fd/{fd}/link.sock")
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise InstallFailed(ENDED) from error
        finally:
            os.close(fd)
        try:
            writer.write(json.dumps(order).encode())
            await writer.drain()
            writer.write_eof()
            received = bytearray()
            while data := await reader.read(65_536):
                received += data
                if len(received) > ANSWER_LIMIT:
                    raise InstallFailed(TOO_LONG)
        except ConnectionError as error:
            raise InstallFailed(ENDED) from error
        finally:
            writer.close()
        return decoded(bytes(received))

    async def _watch_size(self, build: Path, limit: int, pids: tuple[int, int]) -> None:
        """Kill the installation when it exceeds the limit."""
        failure = await wait_until_too_large(build, limit, pids[1])
        await asyncio.to_thread(_kill_all, pids)
        raise failure

    async def _kill(self, starting: asyncio.Future[tuple[int, int]]) -> None:
        await asyncio.wait([starting])
        if starting.cancelled() or starting.exception() is not None:
            return
        pids = starting.result()
        await asyncio.to_thread(_kill_all, pids)
        self._spawner.exits.pop(pids[0], None)

    async def _end(self, name: str) -> None:
        await asyncio.shield(asyncio.to_thread(self._clear, name))

    def _clear(self, name: str) -> None:
        if not cgroups.kill_and_remove(self._host.groups, name, KILL_TIMEOUT):
            log.warning("install.not_killed", install=name)
            return
        remove_tree(self._root / name)


def _kill_all(pids: tuple[int, int]) -> None:
    """Kill the sandbox: with its PID 1, all processes of the PID namespace end."""
    started = {pid: processes.start_time(pid) for pid in pids}
    for pid, when in started.items():
        if when is not None:
            processes.kill(pid, when)
    for pid, when in started.items():
        if when is not None and not processes.wait(pid, when, KILL_TIMEOUT):
            raise TemporaryError(f"Process {pid} does not end.", code="instance_stuck")


class LogPipe:
    """Receives the output through a named pipe, so that it takes no disk space."""

    def __init__(self, fifo: Path, on_output: Callable[[bytes], None]) -> None:
        self._on_output = on_output
        # For reading and writing: it is open before the first writer, and stays open.
        self._fd = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> bool:
        try:
            self._on_output(os.read(self._fd, 65_536))
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        for _ in range(MAX_FINAL_READS):
            if not self._read():
                break
        os.close(self._fd)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, InstallFailed):
        await task


async def _close(server: asyncio.Server) -> None:
    server.close()
