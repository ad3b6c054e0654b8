"""Statistics of creates and starts: enough to size a pool, and bounded."""

from __future__ import annotations

from datetime import timedelta

import pytest

from atoll.service.pool.stats import MAX_CREATES, PoolStats
from tests.component.reconcile.test_strays import ManualClock

WINDOW = timedelta(seconds=60)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def stats(clock: ManualClock) -> PoolStats:
    stats = PoolStats(clock, WINDOW)
    stats.keep({"a"})
    return stats


def test_the_rate_covers_the_window(stats: PoolStats, clock: ManualClock) -> None:
    for _ in range(30):
        stats.record_take("a", hit=True)
    assert stats.rate("a") == 0.5
    clock.time += WINDOW / 2
    for _ in range(30):
        stats.record_take("a", hit=False)
    assert stats.rate("a") == 1.0
    clock.time += WINDOW / 2
    assert stats.rate("a") == 0.5
    clock.time += WINDOW / 2
    assert (stats.rate("a"), stats.burst("a")) == (0.0, 0)
    assert stats.counts("a") == (30, 30)


def test_a_burst_counts_concurrent_creates(stats: PoolStats, clock: ManualClock) -> None:
    for many in (1, 5, 2):
        for _ in range(many):
            stats.record_take("a", hit=True)
        clock.time += timedelta(seconds=2)
    assert stats.burst("a") == 5


def test_a_slow_start_makes_bursts_larger(stats: PoolStats, clock: ManualClock) -> None:
    stats.record_start("a", 10.0, None)
    for many in (1, 5, 2):
        for _ in range(many):
            stats.record_take("a", hit=True)
        clock.time += timedelta(seconds=2)
    assert stats.burst("a") == 8


def test_creates_beyond_the_memory_count_by_their_rate(
    stats: PoolStats, clock: ManualClock
) -> None:
    for _ in range(3 * MAX_CREATES):
        stats.record_take("a", hit=True)
        clock.time += timedelta(milliseconds=1)
    assert stats.rate("a") == pytest.approx(1000, rel=0.01)
    assert stats.burst("a") == pytest.approx(1000, rel=0.01)


def test_the_duration_of_a_start_is_the_median(stats: PoolStats) -> None:
    assert stats.start_seconds("a") is None
    assert stats.memory("a") is None
    for seconds, memory in ((0.1, 7), (9.0, 900), (0.2, 8)):
        stats.record_start("a", seconds, memory)
    stats.record_start("a", 0.15, None)
    assert stats.start_seconds("a") == pytest.approx(0.175)
    assert stats.memory("a") == 8


def test_a_template_without_a_pool_is_not_recorded(stats: PoolStats) -> None:
    stats.record_take("b", hit=False)
    stats.record_start("b", 1.0, 1)
    assert (stats.counts("b"), stats.rate("b"), stats.start_seconds("b")) == ((0, 0), 0.0, None)
    stats.record_take("a", hit=True)
    stats.keep({"b"})
    stats.keep({"a"})
    assert stats.counts("a") == (0, 0)
