"""
Installs Python packages, each time in a container of the template's image.

The container is confined as an instance is. It can write to one directory and talk to the process
that started it, and it ends with that process because its standard input does; the engine then
removes it. The directory exists longer than the container, and what the installation made is moved
out of it. `open` removes what killed processes left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from typing import TYPE_CHECKING, Any

import structlog

from atoll.drivers.docker import container_config
from atoll.drivers.docker.container_config import BaseImage, ContainerSpec
from atoll.drivers.docker.engine import close_stream
from atoll.drivers.docker.errors import EngineUnavailable, translated
from atoll.drivers.docker.installer_stream import InstallerStream
from atoll.drivers.docker.labels import Label
from atoll.drivers.shared.disk_images import MIN_IMAGE, make_file_system
from atoll.drivers.shared.file_trees import remove_tree
from atoll.drivers.shared.mount_points import unmount
from atoll.drivers.shared.mount_syscalls import mount_image
from atoll.drivers.shared.packages import install_program
from atoll.drivers.shared.packages.install_results import InstallFailed
from atoll.drivers.shared.packages.installation import (
    InstallOutput,
    is_abandoned,
    record_owner,
    start_errors,
    wait_until_too_large,
)
from atoll.errors import AtollError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from aiodocker.stream import Stream

    from atoll.drivers.base import ConnectionHandler
    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.installer_tools import InstallerTools
    from atoll.model.resources import Resources
    from atoll.settings import DockerSettings

log = structlog.get_logger(__name__)


class Installer:
    def __init__(
        self,
        engine: Engine,
        settings: DockerSettings,
        directory: Path,
        node: str,
        tools: InstallerTools,
        *,
        images: bool,
    ) -> None:
        """
        Installations write below `directory`. `node` is the value of `Label.NODE`. With `images`,
        each installation writes to a file system image of its own; otherwise its size is watched.
        """
        self._images = images
        self._engine = engine
        self._settings = settings
        self._directory = directory
        self._node = node
        self._tools = tools

    async def open(self) -> None:
        for name in await asyncio.to_thread(self._abandoned):
            try:
                await self._clear(name)
            except AtollError as error:
                log.warning("install.not_removed", install=name, error=error.message)

    def _abandoned(self) -> list[str]:
        self._directory.mkdir(exist_ok=True, mode=0o700)
        names = os.listdir(self._directory)
        return [name for name in names if is_abandoned(self._directory / name)]

    @contextlib.asynccontextmanager
    async def run(
        self,
        base: BaseImage,
        order: dict[str, Any],
        *,
        resources: Resources,
        handler: ConnectionHandler | None,
        on_output: Callable[[bytes], None],
    ) -> AsyncIterator[InstallOutput]:
        """
        Run an order. Its result is removed at the end. `handler` serves connections made in
        the container, and `on_output` receives what is printed there.
        """
        name = f"install_{secrets.token_hex(10)}"
        directory = self._directory / name
        build = directory / "build"
        mounts, uv = await self._tools.for_image(base)
        order = {
            **order,
            "python": base.executable,
            "uv": uv,
            "limits": {"FSIZE": resources.disk},
            # Instances, too, run the start-up code of an image's packages.
            "hooks": True,
        }
        spec = ContainerSpec(
            base=base,
            labels={Label.NODE: self._node, Label.INSTALL: name},
            mounts=(
                *mounts,
                container_config.bind(str(build), install_program.BUILD, read_only=False),
            ),
            resources=resources,
            uid=container_config.UID,
            tmp_size=self._settings.tmp_size,
            open_files=self._settings.open_files,
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._end, name)
            with start_errors():
                await asyncio.to_thread(self._make, directory, resources.disk)
            # Not cancelled: the engine would continue.
            starting = asyncio.ensure_future(self._start(name, spec))
            stack.push_async_callback(self._kill, name, starting)
            stream = await asyncio.shield(starting)
            asking = asyncio.create_task(InstallerStream(stream, handler, on_output).ask(order))
            stack.push_async_callback(_cancelled, asking)
            waiting: list[asyncio.Task[Any]] = [asking]
            if not self._images:
                waiting.append(asyncio.create_task(wait_until_too_large(build, resources.disk)))
                stack.callback(waiting[-1].cancel)
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise waiting[-1].result()
            try:
                answered = asking.result()
            except InstallFailed as error:
                obstacle = await self._engine.ping()
                if obstacle is not None:
                    raise EngineUnavailable(obstacle) from error
                raise
            await self._kill(name, starting)
            yield InstallOutput(answered, directory, build, None, base.executable)

    def _make(self, directory: Path, size: int) -> None:
        directory.mkdir(mode=0o700)
        record_owner(directory)
        build = directory / "build"
        build.mkdir(mode=0o700)
        if self._images:
            make_file_system(directory / "disk", max(size, MIN_IMAGE))
            mount_image(str(directory / "disk"), str(build))
        os.chown(build, container_config.UID, container_config.UID)

    async def _start(self, name: str, spec: ContainerSpec) -> Stream:
        with translated():
            container = await self._engine.docker.containers.create(
                container_config.installation_body(spec), name=_container(name)
            )
            stream = container.attach(stdin=True, stdout=True, stderr=True)
            try:
                # Attach first, so that no output is missed.
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
        # The container first: it may still write to the directory.
        await self._engine.remove(_container(name))
        await asyncio.to_thread(self._remove, self._directory / name)

    @staticmethod
    def _remove(directory: Path) -> None:
        unmount(directory / "build")
        remove_tree(directory)


async def _cancelled(task: asyncio.Task[dict[str, Any]]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, InstallFailed):
        await task


def _container(name: str) -> str:
    return f"atoll-{name}"
