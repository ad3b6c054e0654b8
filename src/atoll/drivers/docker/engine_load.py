"""
Load of a machine whose engine is the only source: the sum of the limits of this node's running
containers. Other programs on that machine are not counted.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from atoll.drivers.docker.errors import translated
from atoll.drivers.docker.labels import Label
from atoll.errors import TemporaryError
from atoll.model.node import NodeMetrics

if TYPE_CHECKING:
    from atoll.drivers.docker.engine import Engine

NANO_CPUS = 1_000_000_000


class EngineLoad:
    def __init__(self, engine: Engine, node: str) -> None:
        """`node` is the value of `Label.NODE` on this node's containers."""
        self._engine = engine
        self._node = node
        self._limits: dict[str, tuple[float, int]] = {}
        """CPUs and bytes of memory by container."""

    def forget(self, container: str) -> None:
        """Read the limits of a container again: they have changed."""
        self._limits.pop(container, None)

    async def metrics(self) -> NodeMetrics:
        """Unchanged while the engine does not answer; the driver's health check reports that."""
        info = self._engine.info
        cpus, memory = max(1, int(info["NCPU"])), max(1, int(info["MemTotal"]))
        with contextlib.suppress(TemporaryError), translated():
            await self._update()
        used_cpus = sum(limits[0] for limits in self._limits.values())
        used_memory = sum(limits[1] for limits in self._limits.values())
        return NodeMetrics(
            cpu_usage=min(1.0, used_cpus / cpus),
            mem_usage=min(1.0, used_memory / memory),
            disk_free=0,
            cpu_count=cpus,
            mem_total=memory,
            load_average=0.0,
        )

    async def _update(self) -> None:
        labels = [f"{Label.NODE}={self._node}", Label.INSTANCE]
        running = await self._engine.containers(
            {"label": labels, "status": ["running"]}, stopped=False
        )
        ids = [str(container["Id"]) for container in running]
        self._limits = {id_: self._limits.get(id_) or await self._read(id_) for id_ in ids}

    async def _read(self, container: str) -> tuple[float, int]:
        found = await self._engine.inspect(container)
        if found is None:
            return 0.0, 0
        return found["HostConfig"]["NanoCpus"] / NANO_CPUS, found["HostConfig"]["Memory"]
