"""What installations of packages have in common, whatever kind of sandbox they run in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.drivers.shared import processes
from atoll.drivers.shared.file_trees import TooDeep, deleted_size, tree_size
from atoll.drivers.shared.packages.install_results import (
    InstallFailed,
)
from atoll.errors import InstanceNotStarted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


MIN_CHECK_INTERVAL = 0.5
"""Least number of seconds between two measurements of the size."""
OWNER = "owner"
ABANDONED_AFTER = 60.0
"""Seconds after which a directory without an owner is removed."""


@dataclass(frozen=True)
class InstallOutput:
    """What an installation has left behind; valid until its directory is removed."""

    answer: dict[str, Any]
    """Of `install_program`. Not trusted: it ran in the template's image."""
    directory: Path
    """The installation's directory on the node's disk."""
    build: Path
    """The directory that the installation could write to, or the mount point of `image`."""
    image: Path | None
    """The file system image that it wrote to, if that is not mounted."""
    python: str
    """Path of the template's interpreter in the sandbox."""


@contextlib.contextmanager
def start_errors() -> Iterator[None]:
    """Translate errors of the node into a temporary error, because a retry may succeed."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        raise InstanceNotStarted(f"An installation could not be started: {error}") from error


def record_owner(directory: Path) -> None:
    """Record that an installation's directory belongs to this process."""
    pid = os.getpid()
    (directory / OWNER).write_text(f"{pid} {processes.start_time(pid)}")


def is_abandoned(directory: Path) -> bool:
    """Whether the process that owns an installation's directory has ended."""
    try:
        owner = (directory / OWNER).read_text().split()
        return processes.start_time(int(owner[0])) != int(owner[1])
    except (OSError, ValueError, IndexError):
        # Another replica is just making it, or it was not removed completely.
        return time.time() - directory.stat().st_mtime >= ABANDONED_AFTER


async def wait_until_too_large(build: Path, limit: int, pid: int | None = None) -> InstallFailed:
    """
    Wait until a directory has more bytes than `limit`, and return the error. Files count that were
    deleted and are still open in the PID namespace of process `pid`.
    """

    def size() -> int:
        return tree_size(build) + (0 if pid is None else deleted_size(pid, build))

    pause = MIN_CHECK_INTERVAL
    while True:
        await asyncio.sleep(pause)
        began = time.monotonic()
        try:
            if await asyncio.to_thread(size) > limit:
                return InstallFailed(
                    f"The packages take more than {limit} bytes of disk while they are installed."
                )
        except TooDeep:
            return InstallFailed("A package has directories that are too deep.")
        pause = max(MIN_CHECK_INTERVAL, 5 * (time.monotonic() - began))


def uv_binary() -> str | None:
    """The uv that is installed beside Atoll, else the one on the PATH."""
    try:
        import uv

        return os.fspath(uv.find_uv_bin())
    except (ImportError, FileNotFoundError):
        return shutil.which("uv")
