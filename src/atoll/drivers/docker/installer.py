"""
Installations on a node with a Docker engine: each in a container of the template's image, confined
as an instance is, which can write to one directory and talk to who started it.

Its directory is made before the container and removed after it, with all that it made; what is to
be kept is moved away before. A container ends when its standard input does, so with the process
that started it, and is removed by its engine then. What a process that was killed left is removed
by the next one that opens the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from typing import TYPE_CHECKING, Any

import structlog

from atoll.drivers.docker import container_config, portable_interpreter
from atoll.drivers.docker.engine import close_stream
from atoll.drivers.docker.errors import EngineUnavailable, translated
from atoll.drivers.docker.installer_stream import InstallerStream
from atoll.drivers.docker.labels import Label
from atoll.drivers.shared.disk_images import MIN_IMAGE, make_file_system
from atoll.drivers.shared.file_trees import remove_tree
from atoll.drivers.shared.mount_calls import mount_image
from atoll.drivers.shared.mount_points import unmount
from atoll.drivers.shared.packages import install_program
from atoll.drivers.shared.packages.install_answers import InstallFailed
from atoll.drivers.shared.packages.installation import (
    Made,
    is_abandoned,
    not_started,
    outgrown,
    own,
)
from atoll.errors import AtollError, PermanentError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from aiodocker.stream import Stream

    from atoll.drivers.base import Answer
    from atoll.drivers.docker.engine import Engine
    from atoll.model.resources import Resources
    from atoll.settings import DockerSettings

log = structlog.get_logger(__name__)


class Installer:
    def __init__(
        self,
        engine: Engine,
        settings: DockerSettings,
        node: Path,
        label: str,
        uv: str,
        lend: Callable[[], Awaitable[dict[str, Any]]],
        *,
        images: bool,
    ) -> None:
        """
        `label` marks the containers of this node; `lend` tells how the interpreter of Atoll's own
        is mounted, with whose libraries uv is started in an image that may have none. With
        `images`, what an installation writes is in a file system of its own: the engine sees what
        is mounted beneath the node's directory.
        """
        self._images = images
        self._engine = engine
        self._settings = settings
        self._node = node
        self._root = node / "installs"
        self._label = label
        self._uv = uv
        self._lend = lend
        self._tools: tuple[list[dict[str, Any]], list[str]] | None = None
        self._preparing = asyncio.Lock()

    async def open(self) -> None:
        """Remove what those left that are no more."""
        for name in await asyncio.to_thread(self._abandoned):
            try:
                await self._clear(name)
            except AtollError as error:
                log.warning("install.rest_stays", install=name, error=error.message)

    def _abandoned(self) -> list[str]:
        self._root.mkdir(exist_ok=True, mode=0o700)
        return [name for name in os.listdir(self._root) if is_abandoned(self._root / name)]

    @contextlib.asynccontextmanager
    async def run(
        self,
        tree: container_config.Base,
        order: dict[str, Any],
        *,
        resources: Resources,
        answer: Answer | None,
        hear: Callable[[bytes], None],
    ) -> AsyncIterator[Made]:
        """
        Have the program inside carry out an order. What it made goes when this is left. `answer` is
        who serves what is connected to the gateway inside.
        """
        name = f"install_{secrets.token_hex(10)}"
        place = self._root / name
        mounts, uv = await self._prepared(tree)
        order = {
            **order,
            "python": tree.executable,
            "uv": uv,
            "limits": {"FSIZE": resources.disk},
            # Start-up code that an image's packages bring is run in its instances too.
            "hooks": True,
        }
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._end, name)
            with not_started():
                await asyncio.to_thread(self._make, place, resources.disk)
            build = container_config.bind(
                str(place / "build"), install_program.BUILD, read_only=False
            )
            wanted = container_config.Installation(
                base=tree,
                labels={
                    Label.NODE: self._label,
                    Label.INSTALL: name,
                },
                mounts=(*mounts, build),
                resources=resources,
                tmp_size=self._settings.tmp_size,
                open_files=self._settings.open_files,
            )
            # What the engine is at cannot be called back.
            starting = asyncio.ensure_future(self._start(name, wanted))
            stack.push_async_callback(self._kill, name, starting)
            stream = await asyncio.shield(starting)
            asking = asyncio.create_task(InstallerStream(stream, answer, hear).ask(order))
            stack.push_async_callback(_cancelled, asking)
            waiting: list[asyncio.Task[Any]] = [asking]
            if not self._images:
                waiting.append(asyncio.create_task(outgrown(place / "build", resources.disk)))
                stack.callback(waiting[-1].cancel)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise waiting[-1].result()
            try:
                answered = asking.result()
            except InstallFailed as error:
                trouble = await self._engine.ping()
                if trouble is not None:
                    raise EngineUnavailable(trouble) from error
                raise
            await self._kill(name, starting)
            yield Made(answered, place, place / "build", None, tree.executable)

    def _make(self, place: Path, size: int) -> None:
        place.mkdir(mode=0o700)
        own(place)
        build = place / "build"
        build.mkdir(mode=0o700)
        if self._images:
            make_file_system(place / "disk", max(size, MIN_IMAGE))
            mount_image(str(place / "disk"), str(build))
        os.chown(build, container_config.UID, container_config.UID)

    async def _prepared(
        self, tree: container_config.Base
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """What has to be mounted besides the directory, and the command that is uv."""
        async with self._preparing:
            if self._tools is None:
                self._tools = await self._found_tools()
        mounts, uv = self._tools
        # An image without Python has the interpreter mounted already.
        return [mount for mount in mounts if mount not in tree.mounts], uv

    async def _found_tools(self) -> tuple[list[dict[str, Any]], list[str]]:
        # Copies: of all that is here, the engine need see the data directory alone.
        program, uv = await asyncio.to_thread(
            lambda: [_copied(self._node, path) for path in (install_program.__file__, self._uv)]
        )
        mounts = [
            container_config.bind(str(program), install_program.PROGRAM, read_only=True),
            container_config.bind(str(uv), install_program.UV, read_only=True),
        ]
        if await asyncio.to_thread(portable_interpreter.is_linked, self._uv):
            try:
                return [*mounts, await self._lend()], [
                    *portable_interpreter.loaded(),
                    install_program.UV,
                ]
            except PermanentError as error:
                # It starts in images whose C library is like this machine's.
                log.warning("install.uv_without_libraries", error=error.message)
        return mounts, [install_program.UV]

    async def _start(self, name: str, wanted: container_config.Installation) -> Stream:
        with translated():
            container = await self._engine.docker.containers.create(
                container_config.installation_body(wanted), name=_container(name)
            )
            stream = container.attach(stdin=True, stdout=True, stderr=True)
            try:
                # Attached first: what it says is heard from the start.
                await stream._init()
                await container.start()
            except BaseException:
                await close_stream(stream)
                raise
        return stream

    async def _kill(self, name: str, starting: asyncio.Future[Stream]) -> None:
        await asyncio.wait([starting])
        if not starting.cancelled() and starting.exception() is None:
            await close_stream(starting.result())
        await asyncio.shield(self._engine.remove(_container(name)))

    async def _end(self, name: str) -> None:
        await asyncio.shield(self._clear(name))

    async def _clear(self, name: str) -> None:
        # Never the directory before the container that may write to it.
        await self._engine.remove(_container(name))
        await asyncio.to_thread(self._remove, self._root / name)

    @staticmethod
    def _remove(place: Path) -> None:
        unmount(place / "build")
        remove_tree(place)


async def _cancelled(task: asyncio.Task[dict[str, Any]]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, InstallFailed):
        await task


def _container(name: str) -> str:
    return f"atoll-{name}"


def _copied(directory: Path, source: str) -> Path:
    """A file as it is in `directory`, whole."""
    status = os.stat(source)
    stem, suffix = os.path.splitext(os.path.basename(source))
    path = directory / f"{stem}-{status.st_size:x}-{status.st_mtime_ns:x}{suffix}"
    if not path.exists():
        temporary = path.with_suffix(f".{secrets.token_hex(4)}")
        shutil.copyfile(source, temporary)
        temporary.chmod(0o555)
        temporary.replace(path)
    return path
