"""
Whether workspaces can be directories of ours, or have to be volumes of the engine, and whether they
can be file system images there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import time
from typing import TYPE_CHECKING

from aiodocker.exceptions import DockerError

from atoll.drivers.docker.container_config import bind
from atoll.drivers.docker.engine import translated
from atoll.drivers.shared.disk_images import MIN_IMAGE, image_trouble, make_file_system
from atoll.drivers.shared.mount_calls import mount_image
from atoll.drivers.shared.mount_points import unmount
from atoll.errors import PermanentError

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.scratch_containers import ScratchContainers

TARGET = "/probe"
PROBE = ".probe-"
OLD_SECONDS = 600.0


async def obstacle(engine: Engine, scratch: ScratchContainers, node: Path) -> str | None:
    """Why workspaces cannot be directories beneath `node`; none when they can."""
    if not engine.is_local:
        return f"the engine at {engine.url} may be on another machine"
    if os.geteuid() != 0:
        return "Atoll is not root, and files inside belong to another user"
    options = engine.info.get("SecurityOptions") or []
    for name, words in (
        ("name=userns", "the engine gives users in containers other numbers"),
        ("name=rootless", "the engine is not root"),
    ):
        if any(name in option for option in options):
            return words
    if not await _is_seen(scratch, node):
        return f"the engine does not see {node} at the same path"
    return None


async def image_obstacle(scratch: ScratchContainers, node: Path) -> str | None:
    """Why containers cannot be given file system images that are mounted beneath `node`."""
    trouble = await asyncio.to_thread(image_trouble, node)
    if trouble is not None:
        return trouble
    place = node / f"{PROBE}{secrets.token_hex(8)}"
    try:
        await asyncio.to_thread(_mount, node, place)
        if not await _is_seen(scratch, place):
            return f"the engine does not see what is mounted beneath {node}"
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        await asyncio.to_thread(_unmount, place)
    return None


def _mount(node: Path, place: Path) -> None:
    for found in node.glob(f"{PROBE}*"):
        # Of a process that was killed; younger ones may be another replica's, which removes them.
        with contextlib.suppress(OSError):
            if time.time() - found.lstat().st_mtime > OLD_SECONDS and found.is_dir():
                _unmount(found)
    place.mkdir(mode=0o700)
    image = place / "image"
    make_file_system(image, MIN_IMAGE)
    mount_image(str(image), str(place))


def _unmount(place: Path) -> None:
    unmount(place)
    (place / "image").unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        place.rmdir()


async def _is_seen(scratch: ScratchContainers, place: Path) -> bool:
    """Whether the engine finds a file of ours where we have it."""
    file, content = place / f"{PROBE}{secrets.token_hex(8)}", secrets.token_bytes(16)
    await asyncio.to_thread(file.write_bytes, content)
    try:
        with translated():
            async with scratch.made(bind(str(file), TARGET, read_only=True)) as draft:
                return await scratch.get(draft, TARGET) == content
    except PermanentError as error:
        if isinstance(error.__cause__, DockerError):
            return False  # There is nothing at that path.
        raise
    finally:
        await asyncio.to_thread(file.unlink)
