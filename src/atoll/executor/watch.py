"""
Limits that no control group and no file system holds for us: memory and disk, looked at in turns.

Weaker than the kernel's: a burst shorter than a turn passes, files that are open but have no name
are not seen. Used where the driver says that the host gives nothing better.
"""

from __future__ import annotations

import os
import stat
import time

from . import files, processes
from .loop import Loop
from .runs import Runs

TURN_SECONDS = 0.1
DISK_PAUSE = 4
MEMORY_PLACES = ("/tmp", "/dev/shm")  # noqa: S108 - the instance's own
MAX_WALK = 200_000
INODE_MEMORY = 1024


class Watch:
    def __init__(self, loop: Loop, runs: Runs, root: str) -> None:
        self._loop = loop
        self._runs = runs
        self._root = root
        self._memory = 0
        self._disk = 0
        self._disk_used = 0
        self._disk_due = 0.0
        self._scheduled = False

    def limit(self, limits: dict[str, int]) -> None:
        """Watch for these (0 or absent: not) as long as user code runs."""
        self._memory = limits.get("memory", 0)
        self._disk = limits.get("disk", 0)
        if (self._memory or self._disk) and not self._scheduled:
            self._scheduled = True
            self._disk_used, _ = disk_use(self._root)
            self._loop.after(TURN_SECONDS, self._turn)

    def room(self) -> int | None:
        """Bytes that still fit into the workspace; None where that is not ours to watch."""
        return max(0, self._disk - disk_use(self._root)[0]) if self._disk else None

    def _turn(self) -> None:
        self._scheduled = bool(self._runs.active() or self._runs.background)
        if not self._scheduled:
            return
        if self._memory and self._memory_used() > self._memory:
            self._end_all("memory")
        now = time.monotonic()
        if self._disk and now >= self._disk_due:
            used, whole = disk_use(self._root)
            # Growing, not only too large: code that makes room again must be able to run.
            if not whole or (used > self._disk and used > self._disk_used):
                self._end_all("disk")
            self._disk_used = used
            # A small tree every turn; a large one takes at most a part of our time.
            self._disk_due = now + DISK_PAUSE * (time.monotonic() - now)
        self._loop.after(TURN_SECONDS, self._turn)

    def _memory_used(self) -> int:
        """
        Bytes that user code holds: as the processes have them mapped, if that is little enough,
        else with what they share counted once. What is in /tmp and /dev/shm counts, mapped or not.
        """
        users = [
            process
            for process in processes.everything()
            if process.pid != 1 and process.pid not in self._runs.own
        ]
        stored = sum(_stored(place) for place in MEMORY_PLACES)
        used = sum(process.resident for process in users) + stored
        if used <= self._memory:
            return used
        private = shared = 0
        for process in users:
            own, common = processes.share(process)
            private += own
            shared += common
        return private + max(shared, stored)

    def _end_all(self, reason: str) -> None:
        for run in self._runs.active():
            self._runs.end(run, reason, 0.0)
        for pid in list(self._runs.background):
            processes.kill_tree(pid)


def _stored(place: str) -> int:
    """Bytes of memory that a tmpfs takes, with what the kernel keeps for each file."""
    status = os.statvfs(place)
    blocks = (status.f_blocks - status.f_bfree) * status.f_frsize
    return blocks + (status.f_files - status.f_ffree) * INODE_MEMORY


def disk_use(root: str) -> tuple[int, bool]:
    """
    Bytes that the tree's files occupy, each inode once and at least a block for each of them; and
    whether that is all, or there were more than can be looked at.

    Goes down and up by descriptors: a path may be longer than the kernel takes.
    """
    total = seen = 0
    linked: set[int] = set()
    here = os.open(root, files.DIRECTORY)
    levels: list[tuple[int, list[str]]] = []
    try:
        while True:
            size, count, names = _measure(here, linked, MAX_WALK - seen)
            total += size
            seen += count
            levels.append((os.fstat(here).st_ino, names))
            while True:
                names = levels[-1][1]
                if seen >= MAX_WALK:
                    return total, False
                below = _enter(here, names.pop()) if names else -1
                if below >= 0:
                    break
                if names:
                    continue
                levels.pop()
                if not levels:
                    return total, True
                below = os.open("..", files.DIRECTORY, dir_fd=here)
                os.close(here)
                here = below
                if os.fstat(here).st_ino != levels[-1][0]:
                    # Moved by user code while it was looked at: go on from the top.
                    os.close(here)
                    del levels[1:]
                    here = os.open(root, files.DIRECTORY)
            os.close(here)
            here = below
    finally:
        os.close(here)


def _enter(here: int, name: str) -> int:
    """A directory in a directory; one that user code closed, to hide its files, is opened up."""
    try:
        try:
            return os.open(name, files.DIRECTORY, dir_fd=here)
        except PermissionError:
            os.chmod(name, 0o700, dir_fd=here)
            return os.open(name, files.DIRECTORY, dir_fd=here)
    except OSError:
        return -1  # Removed, or not a directory any more.


def _measure(here: int, linked: set[int], limit: int) -> tuple[int, int, list[str]]:
    """One directory: bytes, entries, and the names of the directories in it."""
    total = seen = 0
    names: list[str] = []
    with os.scandir(here) as items:
        for item in items:
            seen += 1
            if seen > limit:
                break
            try:
                status = item.stat(follow_symlinks=False)
            except OSError:
                continue
            if stat.S_ISDIR(status.st_mode):
                names.append(item.name)
            elif status.st_nlink > 1:
                if status.st_ino in linked:
                    continue
                linked.add(status.st_ino)
            total += max(status.st_blocks * 512, 4096)
    return total, seen, names
