"""Control groups of version 1: a hierarchy for each controller."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from atoll.drivers.shared.cgroups.base import (
    OVERHEAD,
    OWN_PROCESSES,
    PERIOD,
    SOCKET_SHARE,
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

FREEZER = "freezer"
WITH_USER_GROUP = frozenset({"memory", "pids"})
"""Controllers that limit user code apart from the supervisor."""
SOCKET_LIMIT = "memory.kmem.tcp.limit_in_bytes"
MAX_ADOPTIONS = 100
"""Passes over the processes of an instance that forks while it is frozen."""


class CgroupV1(ControlGroups):
    """
    The controllers memory, cpu, pids and freezer, as far as they are mounted and writable. User
    code has its own group in `WITH_USER_GROUP`.
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
            if controller in WITH_USER_GROUP:
                (top / name / "exec").mkdir(exist_ok=True)
        self.limit(name, resources)

    def limit(self, name: str, resources: Resources) -> None:
        if "memory" in self._tops:
            group = self._tops["memory"] / name
            self._limit_memory(group, resources.memory + OVERHEAD)
            self._limit_memory(group / "exec", resources.memory)
        if "cpu" in self._tops:
            write(self._tops["cpu"] / name / "cpu.cfs_period_us", PERIOD)
            write(self._tops["cpu"] / name / "cpu.cfs_quota_us", cpu_quota(resources.cpu))
        if "pids" in self._tops:
            group = self._tops["pids"] / name
            write(group / "pids.max", resources.max_processes + OWN_PROCESSES)
            # One more for the zygote, which is in the group as well.
            write(group / "exec" / "pids.max", resources.max_processes + 1)

    @staticmethod
    def _limit_memory(group: Path, size: int) -> None:
        files = [group / "memory.limit_in_bytes"]
        swap = group / "memory.memsw.limit_in_bytes"
        if swap.exists():
            # The limit without swap may never exceed the one with swap.
            files.append(swap)
            if int(swap.read_text() or 0) < size:
                files.reverse()
        for file in files:
            write(file, size)
        sockets = group / SOCKET_LIMIT
        if sockets.exists():
            # Before the first process: sockets made without a limit are never counted.
            write(sockets, size // SOCKET_SHARE)

    def join_files(self, name: str) -> list[str]:
        return [str(top / name / "cgroup.procs") for top in self._tops.values()]

    def confine(self, name: str, pid: int) -> None:
        for controller, top in self._tops.items():
            if controller in WITH_USER_GROUP:
                write(top / name / "exec" / "cgroup.procs", pid)

    def processes(self, name: str) -> list[int]:
        found: list[int] = []
        for top in self._tops.values():
            found += read_pids(top / name) + read_pids(top / name / "exec")
        return sorted(set(found))

    def memory_kills(self, name: str) -> int:
        if self._memory is None:
            return 0
        return read_counter(f"{self._memory}/{name}/exec/memory.oom_control", b"oom_kill")

    def supervisor_kills(self, name: str) -> int:
        if self._memory is None:
            return 0
        return read_counter(f"{self._memory}/{name}/memory.oom_control", b"oom_kill")

    def memory_used(self, name: str) -> int | None:
        if self._memory is None:
            return None
        return read_size(f"{self._memory}/{name}/memory.usage_in_bytes")

    def freeze(self, name: str, seconds: float) -> bool:
        assert self._freezer is not None
        group = self._freezer / name
        self._adopt(group, name)
        state = str(group / "freezer.state")

        def reached() -> bool | None:
            return {b"FROZEN": True, b"FREEZING": False}.get(read_value(state))

        with ignore_gone():
            write(group / "freezer.state", "FROZEN")
        if wait_until(reached, seconds):
            return True
        self.thaw(name)
        return False

    def _adopt(self, group: Path, name: str) -> None:
        """Move processes into the freezer that started before Atoll used it."""
        for _ in range(MAX_ADOPTIONS):
            outside = set(self.processes(name)) - set(read_pids(group))
            if not outside:
                return
            group.mkdir(parents=True, exist_ok=True)
            for pid in outside:
                with contextlib.suppress(ProcessLookupError):
                    write(group / "cgroup.procs", pid)

    def thaw(self, name: str) -> None:
        if self.frozen(name) and self._freezer is not None:
            with ignore_gone():
                write(self._freezer / name / "freezer.state", "THAWED")

    def frozen(self, name: str) -> bool:
        if self._freezer is None:
            return False
        # FREEZING counts as well: the instance may not answer any more.
        state = read_value(f"{self._freezer}/{name}/freezer.state")
        return state not in (b"", b"THAWED")

    def remove(self, name: str) -> None:
        for top in self._tops.values():
            remove_group(top / name / "exec")
            remove_group(top / name)

    def names(self) -> list[str]:
        found = set()
        for top in self._tops.values():
            if top.is_dir():
                found |= {entry.name for entry in os.scandir(top) if entry.is_dir()}
        return sorted(found)

    def close(self) -> None:
        for top in self._tops.values():
            remove_if_empty(top)
