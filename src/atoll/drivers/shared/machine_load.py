"""CPU, memory and disk usage of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.model.node import NodeMetrics

CPU_TICKS = 100
"""Clock ticks, of all cores together, that a measurement of CPU usage covers at least."""


class MachineLoad:
    def __init__(self, directory: Path) -> None:
        """`directory` is on the disk whose free space is reported."""
        self._directory = directory
        self._cpu_seen = (0.0, 0.0)
        self._cpu_usage = 0.0

    def metrics(self) -> NodeMetrics:
        """Blocking."""
        fields = [int(value) for value in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
        busy, total = float(sum(fields) - fields[3] - fields[4]), float(sum(fields))
        span = total - self._cpu_seen[1]
        if span >= CPU_TICKS:
            # A shorter span would give the usage of an instant.
            self._cpu_usage = min(1.0, max(0.0, (busy - self._cpu_seen[0]) / span))
            self._cpu_seen = (busy, total)
        memory = dict(
            line.split(":") for line in Path("/proc/meminfo").read_text().strip().split("\n")
        )
        kib = {name: int(value.split()[0]) * 1024 for name, value in memory.items()}
        try:
            disk = os.statvfs(self._directory)
            free = disk.f_bavail * disk.f_frsize
        except OSError:
            free = 0  # `Driver.status` reports the problem.
        return NodeMetrics(
            cpu_usage=self._cpu_usage,
            mem_usage=1 - kib["MemAvailable"] / kib["MemTotal"],
            disk_free=free,
            cpu_count=os.cpu_count() or 1,
            mem_total=kib["MemTotal"],
            load_average=os.getloadavg()[0],
        )
