"""
Refuses resources and pool sizes beyond the settings, and resources that no node has.

Only more cores or more memory than the largest node has are refused. Whether a node has room is
decided when a session is placed. Nodes that have not reported their size yet count as large enough.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from atoll.errors import InvalidRequest
from atoll.model.resources import Resources, format_cpu, format_size

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.model.node import Node
    from atoll.model.template import Template
    from atoll.settings import Settings
    from atoll.stores.base import Store

CACHE_SECONDS = 1.0
MIN_MEMORY = 16 * 2**20
MIN_DISK = 4 * 2**20


class ResourceLimits:
    def __init__(self, store: Store, clock: Clock, settings: Settings) -> None:
        self._store = store
        self._clock = clock
        self._session = settings.session
        self._max_pool = settings.pool.max_size
        self._read: tuple[float, list[Node]] | None = None

    @property
    def base(self) -> Resources:
        """Default resources of the settings, which no node refuses."""
        session = self._session
        return Resources(session.cpu, session.memory, session.disk, session.max_processes)

    def check_pool(self, template: Template) -> None:
        for field, size in (("pool_size", template.pool_size), ("pool_max", template.pool_max)):
            if size is not None and size > self._max_pool:
                raise InvalidRequest(
                    f"{field}: at most {self._max_pool} are allowed here.", field=field
                )
        if template.pool_max is not None and template.pool_max < template.pool_size:
            raise InvalidRequest(
                f"pool_max: must be at least {template.pool_size}, the value of pool_size.",
                field="pool_max",
            )

    async def check(self, resources: Resources) -> None:
        self._check_settings(resources)
        await self._check_nodes(resources)

    def _check_settings(self, resources: Resources) -> None:
        for field, value, limit in (
            ("cpu", resources.cpu, self._session.max_cpu),
            ("memory", resources.memory, self._session.max_memory),
            ("disk", resources.disk, self._session.max_disk),
        ):
            if value > limit:
                given = format_cpu(value) if field == "cpu" else format_size(int(value))
                allowed = format_cpu(limit) if field == "cpu" else format_size(int(limit))
                raise InvalidRequest(
                    f"{field}: {given} is more than the {allowed} allowed here.", field=field
                )
        if resources.memory < MIN_MEMORY:
            raise InvalidRequest("memory: an interpreter needs at least 16Mi.", field="memory")
        if resources.disk < MIN_DISK:
            raise InvalidRequest("disk: a file system needs at least 4Mi.", field="disk")

    async def _check_nodes(self, resources: Resources) -> None:
        base = self.base
        if resources.cpu <= base.cpu and resources.memory <= base.memory:
            return
        sizes = [node.metrics for node in await self._nodes()]
        known = [size for size in sizes if size is not None]
        if not known or len(known) < len(sizes):
            return
        cores = max(size.cpu_count for size in known)
        if resources.cpu > max(cores, base.cpu):
            raise InvalidRequest(
                f"cpu: {format_cpu(resources.cpu)} is more than the {cores} cores of the largest "
                "node.",
                code="exceeds_nodes",
                field="cpu",
            )
        memory = max(size.mem_total for size in known)
        # Rounded up, because the kernel reserves a part: a 16 GiB machine reports a little less.
        if resources.memory > max(math.ceil(memory / 2**30) * 2**30, base.memory):
            raise InvalidRequest(
                f"memory: {format_size(resources.memory)} is more than the "
                f"{memory / 2**30:.1f}Gi of the largest node.",
                code="exceeds_nodes",
                field="memory",
            )

    async def _nodes(self) -> list[Node]:
        now = self._clock.monotonic()
        if self._read is None or now - self._read[0] >= CACHE_SECONDS:
            self._read = (now, await self._store.nodes.all())
        return self._read[1]
