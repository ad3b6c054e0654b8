"""
Tests which storage an engine allows: workspaces in directories of this machine or in volumes of the
engine, and whether a workspace directory can be a mounted file system image.
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
from atoll.drivers.docker.errors import EngineRefused, translated
from atoll.drivers.shared.disk_images import MIN_IMAGE, images_problem, make_file_system
from atoll.drivers.shared.mount_points import unmount
from atoll.drivers.shared.mount_syscalls import mount_image

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.scratch_containers import ScratchContainers

TARGET = "/probe"
PROBE = ".probe-"
MAX_AGE = 600.0
"""Seconds after which a probe must belong to a process that was killed."""


async def directory_obstacle(engine: Engine, scratch: ScratchContainers, node: Path) -> str | None:
    """Why workspaces cannot be directories below `node`; null if they can."""
    if not engine.is_local:
        return f"the engine at {engine.url} may be on another machine"
    if os.geteuid() != 0:
        return "Atoll is not root and cannot create files for other users"
    if engine.has_security_option("userns"):
        return "the engine maps the users of containers to other ids"
    if engine.has_security_option("rootless"):
        return "the engine does not run as root"
    if not await _is_visible(scratch, node):
        return f"the engine does not see {node} at the same path"
    return None


async def image_obstacle(scratch: ScratchContainers, node: Path) -> str | None:
    """Why containers cannot use file system images mounted below `node`; null if they can."""
    obstacle = await asyncio.to_thread(images_problem, node)
    if obstacle is not None:
        return obstacle
    mount_point = node / f"{PROBE}{secrets.token_hex(8)}"
    try:
        await asyncio.to_thread(_mount, node, mount_point)
        if not await _is_visible(scratch, mount_point):
            return f"the engine does not see file systems mounted below {node}"
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    finally:
        await asyncio.to_thread(_unmount, mount_point)
    return None


def _mount(node: Path, mount_point: Path) -> None:
    for found in node.glob(f"{PROBE}*"):
        # Younger ones may belong to another replica, which removes them.
        with contextlib.suppress(OSError):
            if time.time() - found.lstat().st_mtime > MAX_AGE and found.is_dir():
                _unmount(found)
    mount_point.mkdir(mode=0o700)
    image = mount_point / "image"
    make_file_system(image, MIN_IMAGE)
    mount_image(str(image), str(mount_point))


def _unmount(mount_point: Path) -> None:
    unmount(mount_point)
    (mount_point / "image").unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        mount_point.rmdir()


async def _is_visible(scratch: ScratchContainers, directory: Path) -> bool:
    """Whether the engine finds a file of this machine at the same path."""
    file, content = directory / f"{PROBE}{secrets.token_hex(8)}", secrets.token_bytes(16)
    await asyncio.to_thread(file.write_bytes, content)
    try:
        with translated():
            async with scratch.create(bind(str(file), TARGET, read_only=True)) as container:
                return await scratch.read(container, TARGET) == content
    except EngineRefused as error:
        if isinstance(error.__cause__, DockerError):
            return False  # Nothing exists at that path.
        raise
    finally:
        await asyncio.to_thread(file.unlink)
