"""
Control groups of instances, version 1 and version 2.

An instance has a group, and in it one named `exec` for user code, so that memory and processes of
user code are limited without the supervisor: what runs out is user code. Where the kernel has a
freezer, all of an instance can be made to stand still at once, user code and supervisor. All of it
is file work of microseconds to milliseconds and blocking; callers use a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from atoll.drivers.shared import processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from atoll.model.resources import Resources
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.drivers.shared import cgroups

if TYPE_CHECKING:
    from atoll.settings import LocalSettings

OVERHEAD = 48 * 1024 * 1024
"""Memory that the supervisor may use beside user code, in bytes."""
SOCKET_SHARE = 4
"""
Version 1 counts buffers of TCP and UDP sockets apart from memory: they may be this part of it more.
"""
UNCHARGED_SHARE = 2
"""
What no version counts, which the executor watches instead, may be this part of it more: buffers of
netlink sockets and of TCP connections that nobody has accepted.
"""
SOCKET_LIMIT = "memory.kmem.tcp.limit_in_bytes"
OWN_PROCESSES = 32
"""
Processes and threads of an instance beside user code: bubblewrap, the supervisor with its workers,
the reporter, and a zygote that is not in the group of user code yet.
"""
PERIOD = 100_000
CONTROLLERS = ("memory", "cpu", "pids")
FREEZER = "freezer"
APART = frozenset({"memory", "pids"})
"""Controllers that hold user code apart from the supervisor."""
GONE = (errno.ENOENT, errno.ENODEV)
"""Said of a group that is not there, and by one that was removed since it was opened."""
LEAF = "server"
"""The group of a server in a scope that was delegated to it."""
ADOPTIONS = 100
"""How often processes that fork are looked for again."""


class Groups(Protocol):
    @property
    def provides(self) -> frozenset[str]:
        """Names of `template.REQUIREMENTS`."""

    @property
    def limits_sockets(self) -> bool:
        """Whether buffers of TCP and UDP sockets are limited."""

    @property
    def freezes(self) -> bool:
        """Whether all processes of an instance can be made to stand still."""

    def make(self, name: str, resources: Resources) -> None:
        """The groups of an instance with its limits; nothing changes for those that are there."""

    def limit(self, name: str, resources: Resources) -> None: ...

    def join_files(self, name: str) -> list[str]:
        """Files to write a pid to, for a process to enter the instance's groups."""

    def confine(self, name: str, pid: int) -> None:
        """Put a process into the group of user code."""

    def processes(self, name: str) -> list[int]:
        """All processes of the instance, by their pids on the host."""

    def kill(self, name: str) -> bool:
        """
        Have the kernel end all processes of the instance, what they fork meanwhile too. False where
        it cannot.
        """

    def memory_kills(self, name: str) -> int:
        """How often the kernel has ended a process of user code for memory."""

    def supervisor_kills(self, name: str) -> int:
        """How often it has ended one beside user code: the supervisor, and with it all."""

    def memory_used(self, name: str) -> int | None:
        """Bytes that all of the instance has; none when that is not counted, or it is gone."""

    def freeze(self, name: str, seconds: float) -> bool:
        """
        Let all processes of the instance stand still; what they fork on the way does so too. False,
        and they go on, when that was not reached in time or somebody thawed them meanwhile.
        """

    def thaw(self, name: str) -> None:
        """Let them go on; nothing happens when they do, or are not there."""

    def frozen(self, name: str) -> bool:
        """Whether they stand still, or are about to."""

    def remove(self, name: str) -> None:
        """
        Remove the groups, which no process is in any more; nothing happens when they are not there.
        """

    def names(self) -> list[str]: ...

    def close(self) -> None:
        """Remove the groups above the instances' if none is left in them."""


def uncharged_sockets(resources: Resources) -> int:
    """Bytes of socket buffers at which the executor ends user code."""
    return resources.memory // UNCHARGED_SHARE


def _write(path: Path, value: str | int) -> None:
    path.write_text(str(value))


@contextlib.contextmanager
def _if_there() -> Iterator[None]:
    """Do nothing to a group that is gone, or goes meanwhile."""
    try:
        yield
    except OSError as error:
        if error.errno not in GONE:
            raise


def _remove(path: Path) -> None:
    try:
        path.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        raise BusyGroup(path) from None


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()


def _pids(group: Path) -> list[int]:
    try:
        return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
    except OSError as error:
        if error.errno not in GONE:
            raise
        return []


def _text(path: str) -> bytes:
    """Read at every look at an instance; nothing when it is not there."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(256).strip()
    except OSError:
        return b""


def wait_until(reached: Callable[[], bool | None], seconds: float) -> bool:
    """False when the time is over, or when it will not be reached any more, which None tells."""
    deadline = time.monotonic() + seconds
    pause = 0.0002
    while not (found := reached()):
        if found is None or time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.02)
    return True


def own_path(own: str) -> str:
    """The group in the unified hierarchy, of the text of /proc/self/cgroup."""
    return next((line[3:] for line in own.splitlines() if line.startswith("0::")), "/")


def enter_leaf(root: Path, own: str, pid: int) -> None:
    """
    Move a process from its group to one below, of which it is the only one. In version 2 a group
    that has processes cannot have controllers in the groups below it.
    """
    leaf = root / own_path(own).strip("/") / LEAF
    leaf.mkdir(exist_ok=True)
    _write(leaf / "cgroup.procs", pid)


def kill_all(groups: Groups, name: str) -> None:
    """
    End every process of the instance. Those that stand still are told before they go on, so that
    none of them runs user code once more.
    """
    if not groups.kill(name):
        for pid in groups.processes(name):
            started = processes.start_time(pid)
            if started is not None:
                processes.kill(pid, started)
    groups.thaw(name)


def emptied(groups: Groups, name: str, seconds: float) -> bool:
    """Remove a group with all that still runs in it; False when something does not end in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            groups.remove(name)
            return True
        except BusyGroup:
            kill_all(groups, name)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)


def enter(groups: Groups, name: str, pid: int) -> None:
    """Put a process that is in none of the instance's groups into that of user code."""
    for path in groups.join_files(name):
        with open(path, "w") as file:
            file.write(str(pid))
    groups.confine(name, pid)


class BusyGroup(Exception):
    """A process is still in the group."""


def _counter(path: str, name: bytes) -> int:
    """Read at every execution, so without the comfort of paths and text."""
    try:
        with open(path, "rb", buffering=0) as file:
            for line in file.read(4096).split(b"\n"):
                key, _, value = line.partition(b" ")
                if key == name:
                    return int(value)
    except OSError as error:
        if error.errno not in GONE:
            raise
    return 0


def _size(path: str) -> int | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return int(file.read(64))
    except OSError as error:
        if error.errno not in GONE:
            raise
        return None


def _quota(cpu: float) -> int:
    return max(1000, int(cpu * PERIOD))


class VersionOne:
    """
    One hierarchy a controller: memory, cpu, pids and the freezer, as far as they are mounted and
    writable. User code has a group of its own in those that tell it from the supervisor.
    """

    def __init__(self, root: Path, name: str, controllers: frozenset[str]) -> None:
        self._tops = {controller: root / controller / name for controller in sorted(controllers)}
        self._memory = str(self._tops["memory"]) if "memory" in self._tops else None
        self.limits_sockets = (root / "memory" / SOCKET_LIMIT).exists()
        self._freezer = self._tops.get(FREEZER)
        self.freezes = self._freezer is not None
        self.provides = frozenset(f"cgroup_{controller}" for controller in controllers - {FREEZER})

    def make(self, name: str, resources: Resources) -> None:
        for controller, top in self._tops.items():
            (top / name).mkdir(parents=True, exist_ok=True)
            if controller in APART:
                (top / name / "exec").mkdir(exist_ok=True)
        self.limit(name, resources)

    def limit(self, name: str, resources: Resources) -> None:
        if "memory" in self._tops:
            group = self._tops["memory"] / name
            self._limit_memory(group, resources.memory + OVERHEAD)
            self._limit_memory(group / "exec", resources.memory)
        if "cpu" in self._tops:
            _write(self._tops["cpu"] / name / "cpu.cfs_period_us", PERIOD)
            _write(self._tops["cpu"] / name / "cpu.cfs_quota_us", _quota(resources.cpu))
        if "pids" in self._tops:
            group = self._tops["pids"] / name
            _write(group / "pids.max", resources.max_processes + OWN_PROCESSES)
            # One more for the zygote, which is in the group too.
            _write(group / "exec" / "pids.max", resources.max_processes + 1)

    @staticmethod
    def _limit_memory(group: Path, size: int) -> None:
        places = [group / "memory.limit_in_bytes"]
        swap = group / "memory.memsw.limit_in_bytes"
        if swap.exists():
            # Never above the one with swap: less is set from the first on, more from the last on.
            places.append(swap)
            if int(swap.read_text() or 0) < size:
                places.reverse()
        for place in places:
            _write(place, size)
        sockets = group / SOCKET_LIMIT
        if sockets.exists():
            # Before the first process: a socket that was made without a limit is never counted.
            _write(sockets, size // SOCKET_SHARE)

    def join_files(self, name: str) -> list[str]:
        return [str(top / name / "cgroup.procs") for top in self._tops.values()]

    def confine(self, name: str, pid: int) -> None:
        for controller, top in self._tops.items():
            if controller in APART:
                _write(top / name / "exec" / "cgroup.procs", pid)

    def processes(self, name: str) -> list[int]:
        found: list[int] = []
        for top in self._tops.values():
            found += _pids(top / name) + _pids(top / name / "exec")
        return sorted(set(found))

    def kill(self, name: str) -> bool:
        return False

    def memory_kills(self, name: str) -> int:
        if self._memory is None:
            return 0
        return _counter(f"{self._memory}/{name}/exec/memory.oom_control", b"oom_kill")

    def supervisor_kills(self, name: str) -> int:
        if self._memory is None:
            return 0
        return _counter(f"{self._memory}/{name}/memory.oom_control", b"oom_kill")

    def memory_used(self, name: str) -> int | None:
        if self._memory is None:
            return None
        return _size(f"{self._memory}/{name}/memory.usage_in_bytes")

    def freeze(self, name: str, seconds: float) -> bool:
        assert self._freezer is not None
        group = self._freezer / name
        self._adopt(group, name)
        state = str(group / "freezer.state")

        def reached() -> bool | None:
            return {b"FROZEN": True, b"FREEZING": False}.get(_text(state))

        with _if_there():
            _write(group / "freezer.state", "FROZEN")
        if wait_until(reached, seconds):
            return True
        self.thaw(name)
        return False

    def _adopt(self, group: Path, name: str) -> None:
        """Processes that began before the freezer was used here are in the other groups alone."""
        for _ in range(ADOPTIONS):
            outside = set(self.processes(name)) - set(_pids(group))
            if not outside:
                return
            group.mkdir(parents=True, exist_ok=True)
            for pid in outside:
                with contextlib.suppress(ProcessLookupError):
                    _write(group / "cgroup.procs", pid)

    def thaw(self, name: str) -> None:
        if self.frozen(name) and self._freezer is not None:
            with _if_there():
                _write(self._freezer / name / "freezer.state", "THAWED")

    def frozen(self, name: str) -> bool:
        # Not whether they all stand still: that they are told to is what keeps them from answering.
        return self._freezer is not None and _text(f"{self._freezer}/{name}/freezer.state") not in (
            b"",
            b"THAWED",
        )

    def remove(self, name: str) -> None:
        for top in self._tops.values():
            _remove(top / name / "exec")
            _remove(top / name)

    def names(self) -> list[str]:
        found = set()
        for top in self._tops.values():
            if top.is_dir():
                found |= {entry.name for entry in os.scandir(top) if entry.is_dir()}
        return sorted(found)

    def close(self) -> None:
        for top in self._tops.values():
            _remove_if_empty(top)


class VersionTwo:
    """One hierarchy. Processes are in the leaves `supervisor` and `exec`, as version 2 demands."""

    def __init__(self, top: Path, controllers: frozenset[str], *, freezes: bool) -> None:
        self._top = top
        self._path = str(top)
        self._controllers = controllers
        self.freezes = freezes
        self.limits_sockets = "memory" in controllers
        self.provides = frozenset(f"cgroup_{controller}" for controller in controllers)

    def make(self, name: str, resources: Resources) -> None:
        self._top.mkdir(exist_ok=True)
        group = self._top / name
        group.mkdir(exist_ok=True)
        enable = " ".join(f"+{controller}" for controller in sorted(self._controllers))
        for parent in (self._top, group):
            _write(parent / "cgroup.subtree_control", enable)
        (group / "supervisor").mkdir(exist_ok=True)
        (group / "exec").mkdir(exist_ok=True)
        self.limit(name, resources)

    def limit(self, name: str, resources: Resources) -> None:
        group = self._top / name
        if "memory" in self._controllers:
            _write(group / "memory.max", resources.memory + OVERHEAD)
            _write(group / "exec" / "memory.max", resources.memory)
            swap = group / "memory.swap.max"
            if swap.exists():
                _write(swap, 0)
        if "cpu" in self._controllers:
            _write(group / "cpu.max", f"{_quota(resources.cpu)} {PERIOD}")
        if "pids" in self._controllers:
            _write(group / "pids.max", resources.max_processes + OWN_PROCESSES)
            _write(group / "exec" / "pids.max", resources.max_processes + 1)

    def join_files(self, name: str) -> list[str]:
        return [str(self._top / name / "supervisor" / "cgroup.procs")]

    def confine(self, name: str, pid: int) -> None:
        _write(self._top / name / "exec" / "cgroup.procs", pid)

    def processes(self, name: str) -> list[int]:
        return [*_pids(self._top / name / "supervisor"), *_pids(self._top / name / "exec")]

    def kill(self, name: str) -> bool:
        place = self._top / name / "cgroup.kill"
        if not place.exists():
            return False  # The kernel is older than 5.14, or the group is gone.
        with _if_there():
            _write(place, 1)
        return True

    def memory_kills(self, name: str) -> int:
        return _counter(f"{self._path}/{name}/exec/memory.events", b"oom_kill")

    def supervisor_kills(self, name: str) -> int:
        return _counter(f"{self._path}/{name}/supervisor/memory.events", b"oom_kill")

    def memory_used(self, name: str) -> int | None:
        return _size(f"{self._path}/{name}/memory.current")

    def freeze(self, name: str, seconds: float) -> bool:
        group = f"{self._path}/{name}"

        def reached() -> bool | None:
            if _counter(f"{group}/cgroup.events", b"frozen"):
                return True
            return False if _text(f"{group}/cgroup.freeze") == b"1" else None

        with _if_there():
            _write(self._top / name / "cgroup.freeze", 1)
        if wait_until(reached, seconds):
            return True
        self.thaw(name)
        return False

    def thaw(self, name: str) -> None:
        if self.frozen(name):
            with _if_there():
                _write(self._top / name / "cgroup.freeze", 0)

    def frozen(self, name: str) -> bool:
        return self.freezes and _text(f"{self._path}/{name}/cgroup.freeze") == b"1"

    def remove(self, name: str) -> None:
        for group in ("supervisor", "exec", ""):
            _remove(self._top / name / group)

    def names(self) -> list[str]:
        if not self._top.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self._top) if entry.is_dir())

    def close(self) -> None:
        _remove_if_empty(self._top)


@dataclass(frozen=True)
class NoGroups:
    """What a host without usable control groups gives: nothing, and it is said so."""

    provides: frozenset[str] = frozenset()
    limits_sockets: bool = False
    freezes: bool = False
    """
    From outside, processes could only be stopped by signals: their parents see that, and who was
    stopped before cannot be told from who was not.
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


def find(root: Path, name: str, own: str) -> Groups:
    """
    The control groups that this process may use.

    `own` is the text of /proc/self/cgroup. Version 2 with its controllers wins; then version 1,
    controller by controller.
    """
    unified = root / "cgroup.controllers"
    if unified.exists():
        found = _version_two(root, name, own)
        if found is not None:
            return found
    usable = frozenset(
        controller
        for controller in (*CONTROLLERS, FREEZER)
        if (root / controller / "cgroup.procs").exists()
        and os.access(root / controller, os.W_OK | os.X_OK)
    )
    return VersionOne(root, name, usable) if usable else NoGroups()


def _version_two(root: Path, name: str, own: str) -> VersionTwo | None:
    """Below the root as root; else below the highest group above ours that was delegated to us."""
    places = [root]
    if not os.access(root / "cgroup.subtree_control", os.W_OK):
        here = root / own_path(own).strip("/")
        chain = [here, *here.parents]
        above = [p for p in chain if p == root or root in p.parents]
        places = [p for p in reversed(above) if _delegated(p)]
    for place in places:
        try:
            available = (place / "cgroup.controllers").read_text().split()
            controllers = _enabled(place, frozenset(CONTROLLERS) & frozenset(available))
            if not controllers:
                continue
            (place / name).mkdir(exist_ok=True)
        except OSError:
            continue  # Not delegated after all, or processes are in it: look further down.
        freezes = (place / name / "cgroup.freeze").exists()
        return VersionTwo(place / name, controllers, freezes=freezes)
    return None


def _delegated(place: Path) -> bool:
    """
    Processes are moved from our own group to one below: for that the kernel asks for the right to
    write to `cgroup.procs` of the group that both are in.
    """
    return all(
        os.access(place / name, os.W_OK) for name in ("cgroup.subtree_control", "cgroup.procs")
    )


def _enabled(place: Path, controllers: frozenset[str]) -> frozenset[str]:
    """
    Those that groups below can have. The kernel refuses all that are asked for together if it
    refuses one, as it does with cpu while real-time processes are in other groups.
    """
    control = place / "cgroup.subtree_control"
    try:
        _write(control, " ".join(f"+{controller}" for controller in sorted(controllers)))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise  # Processes are in it.
    else:
        return controllers
    found = set()
    for controller in sorted(controllers):
        with contextlib.suppress(OSError):
            _write(control, f"+{controller}")
            found.add(controller)
    return frozenset(found)


OWN_GROUP = Path("/proc/self/cgroup")


def find_groups(settings: LocalSettings, node: Path, own: str | None = None) -> cgroups.Groups:
    """
    The control groups of the instances of this node directory, apart from any other's. `own` is the
    text of /proc/self/cgroup.
    """
    if own is None:
        own = OWN_GROUP.read_text()
    tag = hashlib.sha256(str(node.resolve()).encode()).hexdigest()[:12]
    return cgroups.find(settings.cgroup_root, f"{settings.cgroup_name}-{tag}", own)
