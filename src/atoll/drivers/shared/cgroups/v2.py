"""Control groups of version 2: one hierarchy, in which only leaves have processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from atoll.drivers.shared.cgroups.base import (
    OVERHEAD,
    OWN_PROCESSES,
    PERIOD,
    ControlGroups,
    cpu_quota,
)
from atoll.drivers.shared.cgroups.files import (
    ignore_gone,
    read_counter,
    read_pids,
    read_size,
    read_value,
    remove_group,
    remove_if_empty,
    wait_until,
    write,
)

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.model.resources import Resources


class CgroupV2(ControlGroups):
    """An instance's group has the leaves `supervisor` and `exec`."""

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
            write(parent / "cgroup.subtree_control", enable)
        (group / "supervisor").mkdir(exist_ok=True)
        (group / "exec").mkdir(exist_ok=True)
        self.limit(name, resources)

    def limit(self, name: str, resources: Resources) -> None:
        group = self._top / name
        if "memory" in self._controllers:
            write(group / "memory.max", resources.memory + OVERHEAD)
            write(group / "exec" / "memory.max", resources.memory)
            swap = group / "memory.swap.max"
            if swap.exists():
                write(swap, 0)
        if "cpu" in self._controllers:
            write(group / "cpu.max", f"{cpu_quota(resources.cpu)} {PERIOD}")
        if "pids" in self._controllers:
            write(group / "pids.max", resources.max_processes + OWN_PROCESSES)
            write(group / "exec" / "pids.max", resources.max_processes + 1)

    def join_files(self, name: str) -> list[str]:
        return [str(self._top / name / "supervisor" / "cgroup.procs")]

    def confine(self, name: str, pid: int) -> None:
        write(self._top / name / "exec" / "cgroup.procs", pid)

    def processes(self, name: str) -> list[int]:
        return [*read_pids(self._top / name / "supervisor"), *read_pids(self._top / name / "exec")]

    def kill(self, name: str) -> bool:
        file = self._top / name / "cgroup.kill"
        if not file.exists():
            return False  # The kernel is older than 5.14, or the group does not exist.
        with ignore_gone():
            write(file, 1)
        return True

    def memory_kills(self, name: str) -> int:
        return read_counter(f"{self._path}/{name}/exec/memory.events", b"oom_kill")

    def supervisor_kills(self, name: str) -> int:
        return read_counter(f"{self._path}/{name}/supervisor/memory.events", b"oom_kill")

    def memory_used(self, name: str) -> int | None:
        return read_size(f"{self._path}/{name}/memory.current")

    def freeze(self, name: str, seconds: float) -> bool:
        group = f"{self._path}/{name}"

        def reached() -> bool | None:
            if read_counter(f"{group}/cgroup.events", b"frozen"):
                return True
            return False if read_value(f"{group}/cgroup.freeze") == b"1" else None

        with ignore_gone():
            write(self._top / name / "cgroup.freeze", 1)
        if wait_until(reached, seconds):
            return True
        self.thaw(name)
        return False

    def thaw(self, name: str) -> None:
        if self.frozen(name):
            with ignore_gone():
                write(self._top / name / "cgroup.freeze", 0)

    def frozen(self, name: str) -> bool:
        return self.freezes and read_value(f"{self._path}/{name}/cgroup.freeze") == b"1"

    def remove(self, name: str) -> None:
        for group in ("supervisor", "exec", ""):
            remove_group(self._top / name / group)

    def names(self) -> list[str]:
        if not self._top.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self._top) if entry.is_dir())

    def close(self) -> None:
        remove_if_empty(self._top)
