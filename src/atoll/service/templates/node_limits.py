"""
Refuses resources that no node has.

Only more cores or more memory than the largest node has are refused. Whether there is room at the
moment is decided when a session is placed. Nodes that have not reported their size yet count as
large enough.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from atoll.errors import InvalidRequest
from atoll.model.resources import format_cpu, format_size

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.model.node import Node
    from atoll.model.resources import Resources
    from atoll.stores.base import Store

CACHE_SECONDS = 1.0


class NodeLimits:
    def __init__(self, store: Store, clock: Clock, base: Resources) -> None:
        """`base` is what sessions get by the server's settings, and is never refused."""
        self._store = store
        self._clock = clock
        self._base = base
        self._read: tuple[float, list[Node]] | None = None

    async def check(self, resources: Resources) -> None:
        base = self._base
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
        # The kernel keeps some for itself: what is sold as 16 GiB has a little less.
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
