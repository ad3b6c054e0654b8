"""
The programs that an installation mounts into its container: its own, and uv.

They are copied to the node's directory: of this machine, the engine may see only that.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from typing import TYPE_CHECKING, Any

import structlog

from atoll.drivers.docker import container_config
from atoll.drivers.shared import portable_interpreter
from atoll.drivers.shared.packages import install_program
from atoll.drivers.shared.portable_interpreter import InterpreterMissing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from atoll.drivers.docker.container_config import BaseImage

log = structlog.get_logger(__name__)


class InstallerTools:
    def __init__(
        self, directory: Path, uv: str, interpreter: Callable[[], Awaitable[dict[str, Any]]]
    ) -> None:
        """
        `uv` is its path on this machine. `interpreter` returns the mount of the portable
        interpreter, whose libraries uv needs in an image that has none.
        """
        self._directory = directory
        self._uv = uv
        self._interpreter = interpreter
        self._tools: tuple[list[dict[str, Any]], list[str]] | None = None
        self._lock = asyncio.Lock()

    async def for_image(self, base: BaseImage) -> tuple[list[dict[str, Any]], list[str]]:
        """The mounts, and the command that starts uv."""
        async with self._lock:
            if self._tools is None:
                self._tools = await self._prepare()
        mounts, uv = self._tools
        # A container of an image without Python has the interpreter mounted already.
        return [mount for mount in mounts if mount not in base.mounts], uv

    async def _prepare(self) -> tuple[list[dict[str, Any]], list[str]]:
        program, uv = await asyncio.to_thread(
            lambda: [_copy(self._directory, path) for path in (install_program.__file__, self._uv)]
        )
        mounts = [
            container_config.bind(str(program), install_program.PROGRAM, read_only=True),
            container_config.bind(str(uv), install_program.UV, read_only=True),
        ]
        if await asyncio.to_thread(portable_interpreter.is_dynamic, self._uv):
            try:
                interpreter = await self._interpreter()
                return [*mounts, interpreter], [*portable_interpreter.loader(), install_program.UV]
            except InterpreterMissing as error:
                # uv starts nevertheless in images with a C library like this machine's.
                log.warning("install.uv_without_libraries", error=error.message)
        return mounts, [install_program.UV]


def _copy(directory: Path, source: str) -> Path:
    """Copy a file, atomically, to a name that changes with its content."""
    status = os.stat(source)
    stem, suffix = os.path.splitext(os.path.basename(source))
    path = directory / f"{stem}-{status.st_size:x}-{status.st_mtime_ns:x}{suffix}"
    if not path.exists():
        temporary = path.with_suffix(f".{secrets.token_hex(4)}")
        shutil.copyfile(source, temporary)
        temporary.chmod(0o555)
        temporary.replace(path)
    return path
