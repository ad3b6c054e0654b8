"""
How many ready instances a template should have, and what all pools of a node may have together.

Pure decisions: `target` follows from what is asked for, `follow` keeps it from flapping, `share`
keeps all of them within the memory that the node gives to ready instances.
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
"""Margin above the mean: in so many standard deviations of creates that do not know each other."""
MOST_BUSY = 0.95
"""How busy a refill counts at most: beyond, no pool is large enough."""


class Limit(StrEnum):
    """Why a pool is smaller than it would be."""

    MAXIMUM = "maximum"
    """The template's, or that of the settings."""
    MEMORY_SHARE = "memory_share"
    """Ready instances of the node have all the memory that they may have."""
    MEMORY_FREE = "memory_free"
    """The node has too little memory left for another one."""
    FAILURES = "failures"
    """Instances could not be started; it is tried again."""


def bounds(template: Template, max_size: int) -> tuple[int, int]:
    """Ready instances to keep at least and at most; both 0 of a template without a pool."""
    least = template.pool_size
    if least == 0 and template.pool_max is None:
        return 0, 0
    most = max_size if template.pool_max is None else min(template.pool_max, max_size)
    return least, max(least, most)


def need(rate: float, start_seconds: float, *, burst: int = 0, concurrency: int = 1) -> int:
    """
    Ready instances with which creates do not wait.

    While one that was taken is replaced, `rate * start_seconds` others are taken on average, and
    sometimes more; the busier a refill of `concurrency` at a time is, the longer they wait for it.
    `burst` came at once before, and may again.
    """
    load = rate * start_seconds
    busy = min(load / concurrency, MOST_BUSY)
    return max(burst, math.ceil((load + DEVIATIONS * math.sqrt(load)) / (1 - busy)))


def target(
    rate: float,
    start_seconds: float,
    least: int,
    most: int,
    *,
    burst: int = 0,
    concurrency: int = 1,
) -> int:
    """`need`, within bounds. `rate` is creates a second."""
    wanted = need(rate, start_seconds, burst=burst, concurrency=concurrency)
    return max(least, min(wanted, most))


@dataclass(frozen=True, slots=True)
class Level:
    target: int
    since: float
    """When so many were last wanted, or it was last lowered; seconds of a monotonic clock."""


def follow(level: Level, wanted: int, now: float, pause: float) -> Level:
    """
    Up at once, down slowly: after each `pause` in which less was wanted, half the way, so that a
    short silence costs little and a long one ends where it should.
    """
    if wanted >= level.target:
        return Level(wanted, now)
    if now - level.since < pause:
        return level
    return Level(level.target - math.ceil((level.target - wanted) / 2), now)


@dataclass(frozen=True, slots=True)
class Want:
    """What one pool asks for."""

    least: int
    target: int
    memory: int
    """What each of its instances is counted with, in bytes."""


def share(wants: Sequence[Want], budget: int) -> list[int]:
    """
    What each may have: its minimum in any case, and above that what the budget has left, one at a
    time to the pool that has the least memory above its minimum.
    """
    granted = [want.least for want in wants]
    left = budget - sum(want.least * want.memory for want in wants)
    if left >= sum((want.target - want.least) * want.memory for want in wants):
        return [want.target for want in wants]
    line = [(0, index) for index, want in enumerate(wants) if want.target > want.least]
    heapq.heapify(line)
    while line:
        extra, index = heapq.heappop(line)
        want = wants[index]
        if want.memory > left:
            continue
        left -= want.memory
        granted[index] += 1
        if granted[index] < want.target:
            heapq.heappush(line, (extra + want.memory, index))
    return granted
