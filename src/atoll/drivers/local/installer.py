"""
Installations on this machine: each in a sandbox of its own, which can write to one directory and
reach one socket.

Its directory is made before it starts and removed after it has ended, with all that it made; what
is to be kept is moved away before. It ends with the process that started it, and what a process
that was killed left is removed by the next one that opens the node. Memory, CPU and processes are
limited as an instance's are. What it writes goes to a file system image of its own where there can
be one, as root; else the size is looked at while it runs, and a fast writer can exceed it for a
moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import time
from typing import TYPE_CHECKING, Any

import structlog

from atoll.drivers.local import sandbox
from atoll.drivers.local.spawner_client import SpawnRequest
from atoll.drivers.shared import cgroups, processes
from atoll.drivers.shared.disk_images import MIN_IMAGE, loop_device_of, make_file_system
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
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from atoll.drivers.base import ConnectionHandler
    from atoll.drivers.local.sandbox_host import SandboxHost
    from atoll.drivers.local.spawner_client import SpawnerClient
    from atoll.model.resources import Resources
    from atoll.settings import LocalSettings

CONNECT_SECONDS = 30.0
END_SECONDS = 10.0
LAST_WORDS = 16
"""How often the log is read after the end: more than the pipe can hold."""

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
        """Remove what those left that are no more."""
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
        Have the program inside carry out an order. What it made goes when this is left. `handler`
        serves the socket that it can reach.
        """
        name = f"install_{secrets.token_hex(10)}"
        uid = None
        if self._host.staged:
            settings = self._settings
            uid = settings.uid_base + secrets.randbelow(settings.uid_count)
        place = self._root / name
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._end, name)
            with start_errors():
                await asyncio.to_thread(self._prepare, name, uid, resources)
            if handler is not None:
                stack.push_async_callback(_close, await self._serve(place, handler))
            stack.callback(_Ear(place / "log", on_output).close)
            # Neither a thread nor a process under way can be called back.
            starting = asyncio.ensure_future(
                self._spawner.spawn(
                    self._request(name, tree, uid, resources, served=handler is not None)
                )
            )
            stack.push_async_callback(self._kill, starting)
            pids = await asyncio.shield(starting)
            looking = None
            if not self._images:
                looking = asyncio.create_task(self._look(place / "build", resources.disk, pids))
                stack.push_async_callback(_cancel, looking)
            await asyncio.to_thread(self._host.groups.confine, name, pids[1])
            order = {**order, "python": tree.python, "limits": self._limits(resources)}
            try:
                answered = await self._ask(place, order)
            except InstallFailed:
                if looking is not None and looking.done():
                    looking.result()  # It says why.
                raise
            await self._kill(starting)
            image = place / "disk" if self._images else None
            if image is not None:
                await asyncio.to_thread(_wait_until_detached, image)
            yield InstallOutput(answered, place, place / "build", image, tree.python)

    def _limits(self, resources: Resources) -> dict[str, int]:
        limits = {"FSIZE": resources.disk}
        if "cgroup_memory" not in self._host.groups.provides:
            limits["DATA"] = resources.memory
        if "cgroup_pids" not in self._host.groups.provides:
            limits["NPROC"] = resources.max_processes
        return limits

    def _prepare(self, name: str, uid: int | None, resources: Resources) -> None:
        place = self._root / name
        place.mkdir(mode=0o700)
        record_owner(place)
        os.mkfifo(place / "log", 0o600)
        (place / "build").mkdir(mode=0o700)
        if self._images:
            make_file_system(place / "disk", max(resources.disk, MIN_IMAGE))
        elif uid is not None:
            os.chown(place / "build", uid, uid)
        self._host.groups.make(name, resources)

    async def _serve(self, place: Path, handler: ConnectionHandler) -> asyncio.Server:
        directory = os.open(place, os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Through the descriptor: the whole path may be longer than a socket's name can be.
            server = await asyncio.start_unix_server(
                handler, f"/proc/self/fd/{directory}/gateway.sock", limit=64 * 1024
            )
        finally:
            os.close(directory)
        # Only who has it bound into its sandbox can come so far.
        (place / "gateway.sock").chmod(0o666)
        return server

    def _request(
        self,
        name: str,
        tree: sandbox.RootFileSystem,
        uid: int | None,
        resources: Resources,
        *,
        served: bool,
    ) -> SpawnRequest:
        host, place = self._host, self._root / name
        build = str(place / "build")
        image = str(place / "disk") if self._images else None
        sources = host.sources(tree, build, image)
        box = sandbox.Installation(
            tree=tree,
            program=install_program.__file__,
            uv=self._uv,
            gateway=str(place / "gateway.sock") if served else None,
            build=build,
            hidden=host.hidden,
            tmp_size=self._settings.tmp_size,
            seccomp=host.seccomp is not None,
        )
        return SpawnRequest(
            instance=name,
            argv=sandbox.installation_arguments(host.bubblewrap, box, sources),
            directory=str(place),
            log=str(place / "log"),
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

    async def _ask(self, place: Path, order: dict[str, Any]) -> dict[str, Any]:
        directory = os.open(place, os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                reader, writer = await asyncio.open_unix_connection(
                    f"/proc/self/fd/{directory}/link.sock"
                )
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise InstallFailed(ENDED) from error
        finally:
            os.close(directory)
        try:
            writer.write(json.dumps(order).encode())
            await writer.drain()
            writer.write_eof()
            said = bytearray()
            while data := await reader.read(65_536):
                said += data
                if len(said) > ANSWER_LIMIT:
                    raise InstallFailed(TOO_LONG)
        except ConnectionError as error:
            raise InstallFailed(ENDED) from error
        finally:
            writer.close()
        return decoded(bytes(said))

    async def _look(self, build: Path, most: int, pids: tuple[int, int]) -> None:
        """End it when it has written more than it may."""
        failure = await wait_until_too_large(build, most, pids[1])
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
        if not cgroups.kill_and_remove(self._host.groups, name, END_SECONDS):
            log.warning("install.does_not_end", install=name)
            return
        remove_tree(self._root / name)


def _wait_until_detached(image: Path) -> None:
    """The kernel unmounts it a moment after the last process that could write to it has ended."""
    deadline = time.monotonic() + END_SECONDS
    while loop_device_of(image) is not None:
        if time.monotonic() > deadline:
            raise TemporaryError(f"{image} stays mounted.", code="instance_stuck")
        time.sleep(0.002)


def _kill_all(pids: tuple[int, int]) -> None:
    """With its PID 1 the kernel ends every process of the namespace."""
    started = {pid: processes.start_time(pid) for pid in pids}
    for pid, when in started.items():
        if when is not None:
            processes.kill(pid, when)
    deadline = time.monotonic() + END_SECONDS
    for pid, when in started.items():
        while when is not None and processes.start_time(pid) == when:
            if time.monotonic() > deadline:
                raise TemporaryError(f"Process {pid} does not end.", code="instance_stuck")
            time.sleep(0.001)


class _Ear:
    """What it prints, as it comes: a pipe, so that nothing of it takes room on the disk."""

    def __init__(self, fifo: Path, on_output: Callable[[bytes], None]) -> None:
        self._on_output = on_output
        # For both, so that it is open before anybody writes and stays so.
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
        for _ in range(LAST_WORDS):
            if not self._read():
                break
        os.close(self._fd)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, InstallFailed):
        await task


async def _close(server: asyncio.Server) -> None:
    server.close()
