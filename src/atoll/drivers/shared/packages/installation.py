"""What installations of packages have in common, in whatever kind of sandbox they run."""

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


LOOK_SECONDS = 0.5
"""Pause between two looks at the size of what is written, at least."""
OWNER = "owner"


@dataclass(frozen=True)
class InstallOutput:
    """What has come of an installation."""

    answer: dict[str, Any]
    """Of the program inside, which may say anything."""
    place: Path
    """A directory on the node's disk that goes with the installation."""
    build: Path
    """The directory that it could write to, or where that is to be mounted."""
    image: Path | None
    """The file system image with what it wrote, if that is not mounted."""
    python: str
    """The template's interpreter, by its path inside."""


@contextlib.contextmanager
def start_errors() -> Iterator[None]:
    """What the node could not do for an installation may go well later."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        raise InstanceNotStarted(f"An installation could not be started: {error}") from error


def own(place: Path) -> None:
    """The directory of an installation is this process's."""
    me = os.getpid()
    (place / OWNER).write_text(f"{me} {processes.start_time(me)}")


def is_abandoned(place: Path) -> bool:
    """Whether the process whose installation it is of is no more."""
    try:
        owner = (place / OWNER).read_text().split()
        return processes.start_time(int(owner[0])) != int(owner[1])
    except (OSError, ValueError, IndexError):
        # Just being made, by another replica that starts, or the rest of one.
        return time.time() - place.stat().st_mtime >= 60


async def wait_until_too_large(build: Path, most: int, pid: int | None = None) -> InstallFailed:
    """
    Waits until more than so many bytes are beneath, or in files that were removed and are open in
    the namespace of process `pid` still, and tells of it.
    """

    def size() -> int:
        return tree_size(build) + (0 if pid is None else deleted_size(pid, build))

    pause = LOOK_SECONDS
    while True:
        await asyncio.sleep(pause)
        began = time.monotonic()
        try:
            if await asyncio.to_thread(size) > most:
                return InstallFailed(
                    f"The packages take more than {most} bytes of disk while they are installed."
                )
        except TooDeep:
            return InstallFailed("A package has directories that are too deep.")
        pause = max(LOOK_SECONDS, 5 * (time.monotonic() - began))


def uv_binary() -> str | None:
    """The uv that is installed beside Atoll, else the one on the PATH."""
    try:
        import uv

        return os.fspath(uv.find_uv_bin())
    except (ImportError, FileNotFoundError):
        return shutil.which("uv")
