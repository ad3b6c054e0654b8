"""
Limits of memory and disk that the executor enforces itself, by measuring at intervals.

Used where the driver reports that the host has no control group or file system to enforce them: a
workspace in a file system image (`drivers/shared/disk_images.py`) or in an engine's volume with a
quota (`drivers/docker/volume_storage.py`) is limited by the kernel.
They are weaker than the kernel's: a burst between two measurements goes unnoticed, and so does a
file without a name that is mapped but not open.

Buffers of network sockets are measured everywhere: control groups count neither those of netlink
sockets nor those of TCP connections that wait to be accepted.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import errno
import os
import time

from .. import processes
from ..event_loop import Loop
from ..files.disk_usage import disk_use
from .runs import Runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

    from . import kernel_memory

INTERVAL = 0.1
PAUSE_FACTOR = 4
"""A measurement that takes long is followed by a pause this many times as long."""
MAX_CLOSED = 5
"""Measurements in a row at which a process may hide its descriptors."""
MEMORY_DIRECTORIES = ("/tmp", "/dev/shm")  # noqa: S108 - the instance's own
INODE_MEMORY = 1024
SPARE_DISK = 256 * 1024
"""Bytes that a run in a full workspace may add, for example for a temporary file of its shell."""
ADDRESS_SPACE_PER_TABLE_BYTE = 512
"""The least address space that one byte of page tables maps."""
LARGE_TABLES = 1 << 20
"""Bytes of page tables from which on they are read instead of estimated."""
UNSUPPORTED = (
    None,
    errno.EAFNOSUPPORT,
    errno.EINVAL,
    errno.ENOENT,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPROTONOSUPPORT,
)
"""Errors of kernels that do not report a value, such as gVisor."""


class LimitWatch:
    def __init__(self, loop: Loop, runs: Runs, root: str) -> None:
        self._loop = loop
        self._runs = runs
        self._root = root
        self._memory = 0
        self._memory_due = 0.0
        self._sockets = 0
        self._unsupported: set[Callable[[], int]] = set()
        self._closed: dict[int, int] = {}
        """Processes that hid their descriptors, and how many times in a row."""
        self._disk = 0
        self._disk_used = 0
        self._disk_due = 0.0
        self._scheduled = False

    def configure(self, limits: dict[str, int]) -> None:
        """Enforce these limits while user code runs; 0 or absent means unlimited."""
        self._memory = limits.get("memory", 0)
        self._sockets = limits.get("sockets", 0)
        self._disk = limits.get("disk", 0)
        if self._disk:
            # Files that are there already do not count as growth of the next run.
            self._disk_used, _ = disk_use(self._root)
        if (self._memory or self._sockets or self._disk) and not self._scheduled:
            self._scheduled = True
            self._loop.after(INTERVAL, self._check)

    def room(self, disk: int | None = None) -> int | None:
        """
        Bytes that still fit into the workspace; None if the executor does not limit its size.
        `disk` is the limit for requests before the first run.
        """
        limit = disk or self._disk
        return max(0, limit - disk_use(self._root)[0]) if limit else None

    def _check(self) -> None:
        table, runs = self._runs.table, self._runs.active()
        others = bool(table.background or table.contexts)
        self._scheduled = bool(runs) or others
        if not self._scheduled:
            return
        old = time.monotonic() - INTERVAL / 2
        try:
            # Not for each of many short runs, of which one is always active.
            if others or any(run.started <= old for run in runs):
                self._measure()
        finally:
            # After an error too: otherwise the limits would not be enforced any more.
            self._loop.after(INTERVAL, self._check)

    def _measure(self) -> None:
        now = time.monotonic()
        if (self._memory or self._sockets) and now >= self._memory_due:
            if self._exceeds_memory():
                self._end_all("memory")
            self._memory_due = now + PAUSE_FACTOR * (time.monotonic() - now)
        now = time.monotonic()
        if self._disk and now >= self._disk_due:
            used, complete = self._disk_use()
            # Only if it grows: code that removes files must be able to run.
            if not complete or used > max(self._disk, self._disk_used + SPARE_DISK):
                self._end_all("disk")
            self._disk_used = min(self._disk_used, used)
            # A large tree is measured less often, so that this takes a bounded share of time.
            self._disk_due = now + PAUSE_FACTOR * (time.monotonic() - now)

    def _disk_use(self) -> tuple[int, bool]:
        """Bytes of the workspace's files, with or without a name, and whether that is complete."""
        from . import kernel_memory

        used, complete = disk_use(self._root)
        try:
            return used + self._descriptors(self._users()).disk, complete
        except kernel_memory.TooMany:
            return used, False

    def _exceeds_memory(self) -> bool:
        from . import kernel_memory  # Most waiting instances never need it.

        try:
            if self._sockets and self._counted(kernel_memory.network_sockets) > self._sockets:
                return True
            return bool(self._memory) and self._memory_used() > self._memory
        except kernel_memory.TooMany:
            return True

    def _memory_used(self) -> int:
        """
        Bytes of memory that user code uses: first the sum of resident sizes; if that exceeds the
        limit, shared memory is counted once. Files in /tmp and /dev/shm count, mapped or not, and
        so does memory that the kernel holds for processes.
        """
        from . import kernel_memory

        users = [processes.with_memory(process) for process in self._users()]
        descriptors = self._descriptors(users)
        held = (
            sum(_tmpfs_memory(directory) for directory in MEMORY_DIRECTORIES)
            + descriptors.memory
            + self._counted(kernel_memory.system_v)
            + self._counted(kernel_memory.network_sockets)
            + self._counted(kernel_memory.unix_sockets)
            + sum(_page_tables(process) for process in users)
        )
        used = sum(process.resident for process in users) + held
        if used <= self._memory:
            return used
        devices = {os.stat(directory).st_dev for directory in MEMORY_DIRECTORIES}
        mappings = kernel_memory.Mappings(descriptors.files, devices)
        for process in users:
            private, shared = processes.share(process)
            held += private + (mappings.shared(process.pid, shared) if shared else 0)
        return held

    def _users(self) -> list[processes.Process]:
        """Processes of user code, and spare children of the zygote."""
        return [
            process
            for process in processes.everything()
            # PID 1, and processes that an engine started beside it, have no parent in here.
            if process.parent != 0 and not self._runs.table.is_own(process.pid)
        ]

    def _descriptors(self, users: list[processes.Process]) -> kernel_memory.Descriptors:
        from . import kernel_memory

        found = kernel_memory.Descriptors(self._root)
        for process in users:
            found.add(process.pid)
        self._end_closed(users, found.closed)
        return found

    def _counted(self, count: Callable[[], int]) -> int:
        """A value that the kernel reports; 0, and a line in the log, if the kernel does not."""
        if count in self._unsupported:
            return 0
        try:
            return count()
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self._unsupported.add(count)
            os.write(
                2,
                b"atoll: %s cannot be counted: %s\n"
                % (count.__name__.encode(), str(error).encode()),
            )
            return 0

    def _end_closed(self, users: list[processes.Process], closed: list[int]) -> None:
        """
        Kill processes that hide their descriptors: these could hold any amount. Not at once: the
        process of a run is not dumpable until it has its descriptors.
        """
        table = self._runs.table
        parents = {process.pid: process.parent for process in users}
        self._closed = {
            pid: self._closed.get(pid, 0) + 1
            for pid in closed
            if table.is_leader(pid) or not table.is_own(parents[pid])
        }
        for pid, times in self._closed.items():
            if times > MAX_CLOSED:
                processes.send(pid, signal.SIGKILL)

    def _end_all(self, reason: str) -> None:
        for run in self._runs.active():
            self._runs.end(run, reason, 0.0)
        for pid in [*self._runs.table.background, *self._runs.table.contexts]:
            processes.kill_tree(pid)
        if reason == "memory" and self._memory:
            from . import kernel_memory

            # Otherwise the next run would be ended because of memory that this one left behind.
            kernel_memory.remove_system_v()


def _page_tables(process: processes.Process) -> int:
    from . import kernel_memory

    most = process.virtual // ADDRESS_SPACE_PER_TABLE_BYTE
    return most if most < LARGE_TABLES else kernel_memory.page_tables(process.pid)


def _tmpfs_memory(directory: str) -> int:
    """Bytes of memory that a tmpfs uses, including the kernel's data for each file."""
    status = os.statvfs(directory)
    blocks = (status.f_blocks - status.f_bfree) * status.f_frsize
    return blocks + (status.f_files - status.f_ffree) * INODE_MEMORY
