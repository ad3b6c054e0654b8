"""What both versions have in common: the interface, the limits, and how a group is emptied."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from atoll.drivers.shared import processes

if TYPE_CHECKING:
    from atoll.model.resources import Resources

OVERHEAD = 48 * 1024 * 1024
"""Bytes of memory that the supervisor may use beside user code."""
SOCKET_SHARE = 4
"""
Version 1 counts the buffers of TCP and UDP sockets apart from memory: their limit is the memory
limit divided by this.
"""
UNCHARGED_SHARE = 2
"""
Neither version counts the buffers of netlink sockets, or of TCP connections that have not been
accepted. The executor watches them; their limit is the memory limit divided by this.
"""
OWN_PROCESSES = 32
"""
Processes and threads of an instance beside user code: bubblewrap, the supervisor with its workers,
the reporter, and a zygote that has not entered the group of user code yet.
"""
PERIOD = 100_000
"""Microseconds of a period of the CPU quota."""
CONTROLLERS = ("memory", "cpu", "pids")


class ControlGroups(Protocol):
    """The control groups of a node's instances, by the names of the instances."""

    @property
    def provides(self) -> frozenset[str]:
        """Names of `template.REQUIREMENTS`."""

    @property
    def limits_sockets(self) -> bool:
        """Whether buffers of TCP and UDP sockets are limited."""

    @property
    def freezes(self) -> bool:
        """Whether instances can be frozen."""

    def make(self, name: str, resources: Resources) -> None:
        """Make the groups of an instance with its limits; existing groups only get the limits."""

    def limit(self, name: str, resources: Resources) -> None: ...

    def join_files(self, name: str) -> list[str]:
        """Files to which a process writes its pid to enter the instance's groups."""

    def confine(self, name: str, pid: int) -> None:
        """Move a process to the group of user code."""

    def processes(self, name: str) -> list[int]:
        """All processes of the instance, by their pids on the host."""

    def kill(self, name: str) -> bool:
        """
        Let the kernel kill all processes of the instance, also those that are being forked. False
        if the kernel cannot.
        """

    def memory_kills(self, name: str) -> int:
        """How often the kernel has killed a process of user code for lack of memory."""

    def supervisor_kills(self, name: str) -> int:
        """How often it has killed a process beside user code, which ends the instance."""

    def memory_used(self, name: str) -> int | None:
        """Bytes that the instance uses; None if memory is not counted, or the instance is gone."""

    def freeze(self, name: str, seconds: float) -> bool:
        """
        Freeze all processes of the instance, including those that are being forked. Returns False,
        and lets them continue, if that takes longer than `seconds` or another process thaws them
        meanwhile.
        """

    def thaw(self, name: str) -> None:
        """Let a frozen instance run again, if it exists."""

    def frozen(self, name: str) -> bool:
        """Whether the instance is frozen or is being frozen."""

    def remove(self, name: str) -> None:
        """Remove the groups, if they exist. `GroupBusy` while a process is in one of them."""

    def names(self) -> list[str]: ...

    def close(self) -> None:
        """Remove the groups above the instances' groups if no instance is left."""


class GroupBusy(Exception):
    """A process is still in the group."""


@dataclass(frozen=True)
class NoControlGroups:
    """Control groups of a host that has none which Atoll can use: nothing is limited."""

    provides: frozenset[str] = frozenset()
    limits_sockets: bool = False
    freezes: bool = False
    """
    SIGSTOP is no substitute: parents notice it, and a process that was stopped before cannot be
    told from one that was not.
    """

    def make(self, name: str, resources: Resources) -> None: ...
    def limit(self, name: str, resources: Resources) -> None: ...
    def join_files(self, name: str) -> list[str]:
        return []

    def confine(self, name: str, pid: int) -> None: ...
    def processes(self, name: str) -> list[int]:
        return []

    def kill(self, name: str) -> bool:
        return False

    def memory_kills(self, name: str) -> int:
        return 0

    def supervisor_kills(self, name: str) -> int:
        return 0

    def memory_used(self, name: str) -> int | None:
        return None

    def freeze(self, name: str, seconds: float) -> bool:
        return False

    def thaw(self, name: str) -> None: ...
    def frozen(self, name: str) -> bool:
        return False

    def remove(self, name: str) -> None: ...
    def names(self) -> list[str]:
        return []

    def close(self) -> None: ...


def uncharged_sockets(resources: Resources) -> int:
    """Bytes of uncounted socket buffers at which the executor ends user code."""
    return resources.memory // UNCHARGED_SHARE


def cpu_quota(cpu: float) -> int:
    """Microseconds of CPU time in a period."""
    return max(1000, int(cpu * PERIOD))


def enter(groups: ControlGroups, name: str, pid: int) -> None:
    """Move a process from outside the instance to the group of user code."""
    for path in groups.join_files(name):
        with open(path, "w") as file:
            file.write(str(pid))
    groups.confine(name, pid)


def kill_all(groups: ControlGroups, name: str) -> None:
    """
    Kill every process of the instance. A frozen instance is killed before it is thawed, so that no
    user code runs in between.
    """
    if not groups.kill(name):
        for pid in groups.processes(name):
            started = processes.start_time(pid)
            if started is not None:
                processes.kill(pid, started)
    groups.thaw(name)


def kill_and_remove(groups: ControlGroups, name: str, seconds: float) -> bool:
    """Kill what runs in a group and remove it; False if a process does not end in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            groups.remove(name)
            return True
        except GroupBusy:
            kill_all(groups, name)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
