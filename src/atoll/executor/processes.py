"""
Processes of this PID namespace, and killing a whole tree.

A process cannot leave its run's tree: the leader is a subreaper, so orphans become its children.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterable

MAX_SEARCHES = 5
"""
Maximum number of searches for processes of a tree that are not stopped yet. If some are left, the
tree forks faster than it is searched, and one search may take a second: PID 1 gets no more CPU time
than any of its processes.
"""


class Process:
    __slots__ = ("name", "parent", "pid", "resident", "state", "virtual")

    def __init__(
        self, pid: int, parent: int, state: str, name: str, resident: int, virtual: int
    ) -> None:
        self.pid = pid
        self.parent = parent
        self.state = state
        self.name = name
        self.resident = resident  # bytes
        self.virtual = virtual  # bytes


_PAGE = os.sysconf("SC_PAGE_SIZE")


def read(pid: int) -> Process | None:
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name may contain spaces and brackets; the fields after its last bracket do not.
    start, end = text.index(b"("), text.rindex(b")")
    fields = text[end + 2 :].split()
    name = text[start + 1 : end].decode("utf-8", "replace")
    resident, virtual = int(fields[21]) * _PAGE, int(fields[20])
    return Process(pid, int(fields[1]), fields[0].decode(), name, resident, virtual)


def with_memory(process: Process) -> Process:
    """
    The process, or one of its threads if its first thread has ended: then the kernel reports memory
    and descriptors only for the other threads.
    """
    if process.state != "Z":
        return process
    try:
        threads = os.listdir("/proc/%d/task" % process.pid)
    except OSError:
        return process
    for name in threads:
        thread = read(int(name))
        if thread is not None and thread.state not in "ZX":
            return thread
    return process


def share(process: Process) -> tuple[int, int]:
    """
    Bytes of anonymous and of shared memory, each page divided by the number of processes that share
    it. For a process that is not dumpable, such as a spare child, shared pages count in full.
    """
    try:
        try:
            found = _sizes("/proc/%d/smaps_rollup" % process.pid, b"Pss_Anon", b"Pss_Shmem")
        except PermissionError:
            found = _sizes("/proc/%d/status" % process.pid, b"RssAnon", b"RssShmem")
    except (FileNotFoundError, ProcessLookupError):
        return 0, 0  # Ended since it was listed.
    except OSError:
        return process.resident, 0
    return (process.resident, 0) if found[0] < 0 else (found[0], max(0, found[1]))


def _sizes(path: str, *names: bytes) -> list[int]:
    """Values in bytes of these lines of a file; -1 for a missing line."""
    found = [-1] * len(names)
    with open(path, "rb") as file:
        for line in file:
            name, _, value = line.partition(b":")
            if name in names:
                found[names.index(name)] = int(value.split()[0]) * 1024
    return found


def everything() -> list[Process]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            process = read(int(entry))
            if process is not None:
                found.append(process)
    return found


def is_alive(pid: int) -> bool:
    """Whether the process exists and has not exited."""
    process = read(pid)
    return process is not None and process.state not in "ZX"


def children_of(pid: int) -> list[int]:
    """The children of a process; cheap if there are none or few."""
    try:
        with open("/proc/%d/task/%d/children" % (pid, pid), "rb", 0) as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return [process.pid for process in everything() if process.parent == pid]


def descendants(roots: Iterable[int]) -> set[int]:
    """Living processes below `roots`, the roots themselves not included."""
    below: dict[int, list[int]] = {}
    dead: set[int] = set()
    for process in everything():
        below.setdefault(process.parent, []).append(process.pid)
        if process.state in "ZX":
            dead.add(process.pid)
    found: set[int] = set()
    stack = list(roots)
    while stack:
        for child in below.get(stack.pop(), ()):
            if child not in found:
                found.add(child)
                stack.append(child)
    return found - dead


def send(pid: int, number: int) -> bool:
    """Send a signal; returns whether the process exists."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # A process of another user, started from outside.
    return True


def kill_tree(*roots: int) -> None:
    """
    Kill processes and all their descendants.

    They are stopped first, because a stopped process cannot fork. If a tree wakes its processes, or
    replaces them faster than they are found, all processes of the namespace are killed.
    """
    stopped = set(roots)
    for pid in roots:
        send(pid, signal.SIGSTOP)
    for _ in range(MAX_SEARCHES):
        new = descendants(roots) - stopped
        if not new:
            break
        for pid in new:
            send(pid, signal.SIGSTOP)
        stopped |= new
    else:
        kill_everything()
    for pid in stopped:
        send(pid, signal.SIGKILL)


def kill_everything() -> None:
    """Kill all processes except PID 1 in one system call, which no fork can escape."""
    if os.getpid() == 1:
        send(-1, signal.SIGKILL)
