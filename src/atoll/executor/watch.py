"""
Limits that no control group and no file system holds for us: memory and disk, looked at in turns.

Weaker than the kernel's: a burst shorter than a turn passes, files that are open but have no name
are not seen. Used where the driver says that the host gives nothing better.
"""

from __future__ import annotations

import os

from . import processes
from .loop import Loop
from .runs import Runs

TURN_SECONDS = 0.1
DISK_EVERY = 3
MEMORY_PLACES = ("/tmp", "/dev/shm")  # noqa: S108 - the instance's own
MAX_WALK = 200_000


class Watch:
    def __init__(self, loop: Loop, runs: Runs, root: str) -> None:
        self._loop = loop
        self._runs = runs
        self._root = root
        self._memory = 0
        self._disk = 0
        self._disk_used = 0
        self._turns = 0
        self._scheduled = False

    def limit(self, limits: dict[str, int]) -> None:
        """Watch for these (0 or absent: not) as long as user code runs."""
        self._memory = limits.get("memory", 0)
        self._disk = limits.get("disk", 0)
        if (self._memory or self._disk) and not self._scheduled:
            self._scheduled = True
            self._disk_used = disk_use(self._root)
            self._loop.after(TURN_SECONDS, self._turn)

    def _turn(self) -> None:
        self._scheduled = bool(self._runs.active() or self._runs.background)
        if not self._scheduled:
            return
        self._turns += 1
        if self._memory and self._memory_used() > self._memory:
            self._end_all("memory")
        if self._disk and self._turns % DISK_EVERY == 0:
            used = disk_use(self._root)
            # Growing, not only too large: code that makes room again must be able to run.
            if used > self._disk and used > self._disk_used:
                self._end_all("disk")
            self._disk_used = used
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
    status = os.statvfs(place)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def disk_use(root: str) -> int:
    """Bytes that the tree's files occupy, each inode once; at least a block for each of them."""
    total = seen = 0
    linked: set[int] = set()
    stack = [root]
    while stack and seen < MAX_WALK:
        try:
            items = os.scandir(stack.pop())
        except OSError:
            continue
        with items:
            for item in items:
                seen += 1
                try:
                    status = item.stat(follow_symlinks=False)
                    if item.is_dir(follow_symlinks=False):
                        stack.append(item.path)
                except OSError:
                    continue
                if status.st_nlink > 1 and not item.is_dir(follow_symlinks=False):
                    if status.st_ino in linked:
                        continue
                    linked.add(status.st_ino)
                total += max(status.st_blocks * 512, 4096)
    return total
