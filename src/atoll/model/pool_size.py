"""
The sizes of warm pools.

`need` computes the number of ready instances from demand, `smooth` keeps it from flapping, and
`share_memory` keeps all pools of a node within the memory reserved for ready instances.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.model.template import Template

DEVIATIONS = 2.0
"""Margin above the mean number of creates, in standard deviations of a Poisson distribution."""
MAX_UTILISATION = 0.95
"""Upper limit of the refill's utilisation; at 1, no pool is large enough."""


class Limit(StrEnum):
    """Why a pool is smaller than demand requires."""

    MAXIMUM = "maximum"
    """The maximum of the template or of the settings."""
    MEMORY_SHARE = "memory_share"
    """Ready instances use all memory that the node reserves for them."""
    MEMORY_FREE = "memory_free"
    """The node has too little free memory for another instance."""
    FAILURES = "failures"
    """Instances could not be started; retried later."""


def limits(template: Template, max_size: int) -> tuple[int, int]:
    """Minimum and maximum number of ready instances; both 0 for a template without a pool."""
    least = template.pool_size
    if least == 0 and template.pool_max is None:
        return 0, 0
    most = max_size if template.pool_max is None else min(template.pool_max, max_size)
    return least, max(least, most)


def need(rate: float, start_seconds: float, *, burst: int = 0, concurrency: int = 1) -> int:
    """
    Ready instances needed for creates not to wait.

    While an instance that was taken is replaced, `rate * start_seconds` others are taken on
    average. They wait longer the busier the refill is, which starts `concurrency` instances at a
    time. `burst` is the largest number of creates that arrived at once.
    """
    load = rate * start_seconds
    utilisation = min(load / concurrency, MAX_UTILISATION)
    return max(burst, math.ceil((load + DEVIATIONS * math.sqrt(load)) / (1 - utilisation)))


@dataclass(frozen=True, slots=True)
class Level:
    target: int
    since: float
    """When it was last needed or lowered, in seconds of a monotonic clock."""


def smooth(level: Level, wanted: int, now: float, pause: float) -> Level:
    """
    Grow at once and shrink slowly: by half the difference after each `pause` with less demand, so
    that a short break in demand costs little.
    """
    if wanted >= level.target:
        return Level(wanted, now)
    if now - level.since < pause:
        return level
    return Level(level.target - math.ceil((level.target - wanted) / 2), now)


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """What one pool needs."""

    least: int
    target: int
    memory: int
    """Bytes per instance."""


def share_memory(demands: Sequence[PoolDemand], budget: int) -> list[int]:
    """
    The size of each pool. Every pool gets its minimum; the rest of the budget goes, one instance at
    a time, to the pool that has the least memory above its minimum.
    """
    granted = [demand.least for demand in demands]
    left = budget - sum(demand.least * demand.memory for demand in demands)
    if left >= sum((demand.target - demand.least) * demand.memory for demand in demands):
        return [demand.target for demand in demands]
    queue = [(0, index) for index, demand in enumerate(demands) if demand.target > demand.least]
    heapq.heapify(queue)
    while queue:
        extra, index = heapq.heappop(queue)
        demand = demands[index]
        if demand.memory > left:
            continue
        left -= demand.memory
        granted[index] += 1
        if granted[index] < demand.target:
            heapq.heappush(queue, (extra + demand.memory, index))
    return granted
