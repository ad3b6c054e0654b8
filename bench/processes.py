"""What processes have used, from /proc: CPU time, context switches, page faults and memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    cpu: float = 0.0
    """Milliseconds."""
    switches: float = 0.0
    faults: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.cpu + other.cpu, self.switches + other.switches, self.faults + other.faults
        )

    def __sub__(self, other: Usage) -> Usage:
        return self + Usage(-other.cpu, -other.switches, -other.faults)

    def __truediv__(self, count: float) -> Usage:
        return Usage(self.cpu / count, self.switches / count, self.faults / count)


def tree(root: int) -> list[int]:
    """The process and all its descendants."""
    found = [root]
    for pid in found:
        found += children(pid)
    return found


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def threads(pid: int) -> list[int]:
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]


def of_thread(pid: int, thread: int) -> Usage:
    task = Path(f"/proc/{pid}/task/{thread}")
    nanoseconds = int((task / "schedstat").read_text().split()[0])
    switches = sum(
        int(line.split()[1])
        for line in (task / "status").read_text().splitlines()
        if "ctxt_switches" in line
    )
    stat = _stat(task / "stat")
    return Usage(nanoseconds / 1e6, switches, int(stat[7]) + int(stat[9]))


def of_process(pid: int) -> Usage:
    return sum((of_thread(pid, thread) for thread in threads(pid)), Usage())


def cpu_seconds(pid: int) -> float:
    """Of all its threads, ended ones too."""
    stat = _stat(Path(f"/proc/{pid}/stat"))
    return (int(stat[11]) + int(stat[12])) / TICKS


def of_ended_children(pid: int) -> Usage:
    """All children that the process has waited for. The kernel does not add up their switches."""
    stat = _stat(Path(f"/proc/{pid}/stat"))
    milliseconds = (int(stat[13]) + int(stat[14])) * 1000 / TICKS
    return Usage(milliseconds, 0, int(stat[8]) + int(stat[10]))


def _stat(path: Path) -> list[str]:
    """The fields of a stat file that follow the name, which may contain spaces."""
    return path.read_text().rpartition(")")[2].split()


def proportional_set(pid: int) -> int:
    """Bytes of memory, with the process's share of what it shares."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0
