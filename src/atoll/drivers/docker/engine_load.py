"""
How busy a machine is that only its engine tells of: by what the running containers of this node may
use. What else runs there is not known.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from aiodocker.exceptions import DockerError

from atoll.drivers.docker.engine import translated
from atoll.drivers.docker.labels import Label
from atoll.errors import TemporaryError
from atoll.model.node import NodeMetrics

if TYPE_CHECKING:
    from atoll.drivers.docker.engine import Engine

NOT_THERE = 404
NANO = 1_000_000_000


class EngineLoad:
    def __init__(self, engine: Engine, node: str) -> None:
        """`node` is the label of the containers that are ours."""
        self._engine = engine
        self._node = node
        self._sizes: dict[str, tuple[float, int]] = {}
        """CPUs and bytes of memory by container."""

    def forget(self, container: str) -> None:
        """Its limits have changed."""
        self._sizes.pop(container, None)

    async def metrics(self) -> NodeMetrics:
        """As it was, while the engine does not answer: `health` tells that."""
        info = self._engine.info
        cpus, memory = max(1, int(info["NCPU"])), max(1, int(info["MemTotal"]))
        try:
            with translated():
                await self._look()
        except TemporaryError:
            pass
        used_cpus = sum(size[0] for size in self._sizes.values())
        used_memory = sum(size[1] for size in self._sizes.values())
        return NodeMetrics(
            cpu_usage=min(1.0, used_cpus / cpus),
            mem_usage=min(1.0, used_memory / memory),
            disk_free=0,
            cpu_count=cpus,
            mem_total=memory,
            load_average=0.0,
        )

    async def _look(self) -> None:
        label = f"{Label.NODE}={self._node}"
        filters = {"label": [label, Label.INSTANCE], "status": ["running"]}
        async with self._engine.query(
            "containers/json", params={"filters": json.dumps(filters)}
        ) as response:
            there = [str(one["Id"]) for one in await response.json()]
        self._sizes = {
            container: self._sizes.get(container) or await self._size(container)
            for container in there
        }

    async def _size(self, container: str) -> tuple[float, int]:
        try:
            shown: dict[str, Any] = await self._engine.docker.containers.container(container).show()
        except DockerError as error:
            if error.status == NOT_THERE:
                return 0.0, 0
            raise
        host = shown["HostConfig"]
        return host["NanoCpus"] / NANO, host["Memory"]
