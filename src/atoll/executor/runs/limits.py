"""
Limits that no control group and no file system holds for us: memory and disk, looked at in turns.

Weaker than the kernel's: a burst shorter than a turn passes, and a file without a name that is
mapped but not open is not seen. Used where the driver says that the host gives nothing better.
Buffers of network sockets are watched everywhere: no control group counts a netlink socket's, nor
those of a TCP connection that waits to be accepted.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import errno
import os
import stat
import time

from .. import processes
from ..event_loop import Loop
from ..files import removal
from .runs import Runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from . import kernel_memory

TURN_SECONDS = 0.1
PAUSE = 4
"""A look that takes long is followed by a pause this many times as long."""
MAX_CLOSED_LOOKS = 5
"""How many looks in a row a process may keep its descriptors from being seen."""
MEMORY_PLACES = ("/tmp", "/dev/shm")  # noqa: S108 - the instance's own
MAX_WALK = 200_000
INODE_MEMORY = 1024
OWN_FILES = 256 * 1024
"""Bytes that a run in a full workspace may add: its program, a file of its shell."""
BLOCK = 4096
MAPPED_BY_TABLE = 512
"""Bytes of address space for a byte of page tables, at least."""
LARGE_TABLES = 1 << 20
UNSUPPORTED = (
    None,
    errno.EAFNOSUPPORT,
    errno.EINVAL,
    errno.ENOENT,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPROTONOSUPPORT,
)
"""Errors of a kernel that does not report something, as gVisor, which has it in its own memory."""


class Watch:
    def __init__(self, loop: Loop, runs: Runs, root: str) -> None:
        self._loop = loop
        self._runs = runs
        self._root = root
        self._memory = 0
        self._memory_due = 0.0
        self._sockets = 0
        self._uncounted: set[Callable[[], int]] = set()
        self._closed: dict[int, int] = {}
        """Processes that did not let themselves be looked at, and how many times in a row."""
        self._disk = 0
        self._disk_used = 0
        self._disk_due = 0.0
        self._scheduled = False

    def limit(self, limits: dict[str, int]) -> None:
        """Watch for these (0 or absent: not) as long as user code runs."""
        self._memory = limits.get("memory", 0)
        self._sockets = limits.get("sockets", 0)
        self._disk = limits.get("disk", 0)
        if self._disk:
            # What was written before is not the growth of a run that begins now.
            self._disk_used, _ = disk_use(self._root)
        if (self._memory or self._sockets or self._disk) and not self._scheduled:
            self._scheduled = True
            self._loop.after(TURN_SECONDS, self._turn)

    def room(self, disk: int | None = None) -> int | None:
        """
        Bytes that still fit into the workspace; None where that is not ours to watch. `disk` is for
        who comes before anything was run.
        """
        limit = disk or self._disk
        return max(0, limit - disk_use(self._root)[0]) if limit else None

    def _turn(self) -> None:
        runs = self._runs
        self._scheduled = bool(runs.active() or runs.background or runs.hosts)
        if not self._scheduled:
            return
        try:
            self._look()
        finally:
            # Whatever went wrong: a limit that nobody looks at any more is none.
            self._loop.after(TURN_SECONDS, self._turn)

    def _look(self) -> None:
        now = time.monotonic()
        if (self._memory or self._sockets) and now >= self._memory_due:
            if self._holds_too_much():
                self._end_all("memory")
            self._memory_due = now + PAUSE * (time.monotonic() - now)
        now = time.monotonic()
        if self._disk and now >= self._disk_due:
            used, whole = self._disk_use()
            # Growing, not only too large: code that makes room again must be able to run.
            if not whole or used > max(self._disk, self._disk_used + OWN_FILES):
                self._end_all("disk")
            self._disk_used = min(self._disk_used, used)
            # A small tree every turn; a large one takes at most a part of our time.
            self._disk_due = now + PAUSE * (time.monotonic() - now)

    def _disk_use(self) -> tuple[int, bool]:
        """Bytes of the workspace's files, those without a name too, and whether that is all."""
        from . import kernel_memory

        used, whole = disk_use(self._root)
        try:
            return used + self._descriptors(self._users()).disk, whole
        except kernel_memory.TooMany:
            return used, False

    def _holds_too_much(self) -> bool:
        from . import kernel_memory  # Most instances that are waiting never need it.

        try:
            if self._sockets and self._counted(kernel_memory.network_sockets) > self._sockets:
                return True
            return bool(self._memory) and self._memory_used() > self._memory
        except kernel_memory.TooMany:
            return True

    def _memory_used(self) -> int:
        """
        Bytes that user code holds: as the processes have them mapped, if that is little enough,
        else with what they share counted once. What is in /tmp and /dev/shm counts, mapped or not,
        and so does what the kernel holds for them.
        """
        from . import kernel_memory

        users = [processes.with_memory(process) for process in self._users()]
        descriptors = self._descriptors(users)
        held = (
            sum(_stored(place) for place in MEMORY_PLACES)
            + descriptors.memory
            + self._counted(kernel_memory.system_v)
            + self._counted(kernel_memory.network_sockets)
            + self._counted(kernel_memory.unix_sockets)
            + sum(_page_tables(process) for process in users)
        )
        used = sum(process.resident for process in users) + held
        if used <= self._memory:
            return used
        devices = {os.stat(place).st_dev for place in MEMORY_PLACES}
        mappings = kernel_memory.Mappings(descriptors.files, devices)
        for process in users:
            private, shared = processes.share(process)
            held += private + (mappings.shared(process.pid, shared) if shared else 0)
        return held

    def _users(self) -> list[processes.Process]:
        """Processes of user code, and the zygote's children that wait for a job."""
        return [
            process
            for process in processes.everything()
            # Without a parent in here are PID 1 and what an engine started beside it.
            if process.parent != 0 and process.pid not in self._runs.own
        ]

    def _descriptors(self, users: list[processes.Process]) -> kernel_memory.Descriptors:
        from . import kernel_memory

        found = kernel_memory.Descriptors(self._root)
        for process in users:
            found.add(process.pid)
        self._end_closed(users, found.closed)
        return found

    def _counted(self, count: Callable[[], int]) -> int:
        """What the kernel reports; nothing, and the log says so, where it does not report that."""
        if count in self._uncounted:
            return 0
        try:
            return count()
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self._uncounted.add(count)
            os.write(
                2,
                b"atoll: %s cannot be counted: %s\n"
                % (count.__name__.encode(), str(error).encode()),
            )
            return 0

    def _end_closed(self, users: list[processes.Process], closed: list[int]) -> None:
        """
        End processes that keep their descriptors from being looked at: what these hold could be
        any size. Not at once: the process of a run is closed until it has its descriptors.
        """
        parents = {process.pid: process.parent for process in users}
        self._closed = {
            pid: self._closed.get(pid, 0) + 1
            for pid in closed
            if self._runs.is_leader(pid) or parents[pid] not in self._runs.own
        }
        for pid, looks in self._closed.items():
            if looks > MAX_CLOSED_LOOKS:
                processes.send(pid, signal.SIGKILL)

    def _end_all(self, reason: str) -> None:
        for run in self._runs.active():
            self._runs.end(run, reason, 0.0)
        for pid in [*self._runs.background, *self._runs.hosts]:
            processes.kill_tree(pid)
        if reason == "memory" and self._memory:
            from . import kernel_memory

            # Else what comes next would end for what is left of this.
            kernel_memory.remove_system_v()


def _page_tables(process: processes.Process) -> int:
    from . import kernel_memory

    most = process.virtual // MAPPED_BY_TABLE
    return most if most < LARGE_TABLES else kernel_memory.page_tables(process.pid)


def _stored(place: str) -> int:
    """Bytes of memory that a tmpfs takes, with what the kernel keeps for each file."""
    status = os.statvfs(place)
    blocks = (status.f_blocks - status.f_bfree) * status.f_frsize
    return blocks + (status.f_files - status.f_ffree) * INODE_MEMORY


def disk_use(root: str) -> tuple[int, bool]:
    """
    Bytes that the tree's files occupy, each inode once and at least a block for each of them; and
    whether that is all, or there was more than can be looked at.

    Goes down and up by descriptors: a path may be longer than the kernel takes. Nothing that user
    code does to the tree meanwhile is an error here.
    """
    total = seen = 0
    linked: set[int] = set()
    levels: list[tuple[int, list[str]]] = []
    here = _enter(None, root)
    try:
        while here >= 0:
            size, count, names = _measure(here, linked, MAX_WALK - seen)
            total += size
            seen += count
            levels.append((os.fstat(here).st_ino, names))
            below = -1
            while below < 0:
                if seen >= MAX_WALK:
                    return total, False
                names = levels[-1][1]
                if names:
                    below = _enter(here, names.pop())
                    continue
                levels.pop()
                if not levels:
                    return total, True
                above = _leave(here, levels[-1][0])
                os.close(here)
                here = above
                if here < 0:
                    # Moved or closed by user code while it was looked at: go on from the top.
                    del levels[1:]
                    here = _enter(None, root)
                    if here < 0:
                        return total, False
            os.close(here)
            here = below
        return total, False
    finally:
        if here >= 0:
            os.close(here)


def _enter(here: int | None, name: str) -> int:
    """
    A directory in a directory, or -1 when it is gone. One that user code closed, to hide its files,
    is opened up: to be listed it must be readable, to be measured and left again searchable.
    """
    try:
        try:
            fd = os.open(name, removal.DIRECTORY, dir_fd=here)
        except PermissionError:
            os.chmod(name, 0o700, dir_fd=here)
            fd = os.open(name, removal.DIRECTORY, dir_fd=here)
    except OSError:
        return -1  # Removed, or not a directory any more.
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & 0o500 != 0o500:
            os.fchmod(fd, mode | 0o500)
    except OSError:
        pass  # Not ours to open up; what can be seen of it still counts.
    return fd


def _leave(here: int, inode: int) -> int:
    """The directory above, or -1 when that is not the one with this inode number any more."""
    try:
        fd = os.open("..", removal.DIRECTORY, dir_fd=here)
    except OSError:
        return -1
    if os.fstat(fd).st_ino == inode:
        return fd
    os.close(fd)
    return -1


def _measure(here: int, linked: set[int], limit: int) -> tuple[int, int, list[str]]:
    """One directory: bytes, entries, and the names of the directories in it."""
    total = seen = 0
    names: list[str] = []
    try:
        with os.scandir(here) as items:
            for item in items:
                seen += 1
                if seen > limit:
                    break
                try:
                    status = item.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                except OSError:
                    # It is there, and takes at least this much.
                    total += BLOCK
                    if item.is_dir(follow_symlinks=False):
                        names.append(item.name)
                    continue
                if stat.S_ISDIR(status.st_mode):
                    names.append(item.name)
                elif status.st_nlink > 1:
                    if status.st_ino in linked:
                        continue
                    linked.add(status.st_ino)
                total += max(status.st_blocks * 512, BLOCK)
    except OSError:
        pass  # As far as it could be read.
    return total, seen, names
