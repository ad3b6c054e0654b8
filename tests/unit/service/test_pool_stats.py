"""What is remembered of creates and starts: enough to size a pool by, and no more."""

from __future__ import annotations

from datetime import timedelta

import pytest

from atoll.service.pool.stats import CREATES, PoolStats
from tests.component.reconcile.test_strays import MovedClock

WINDOW = timedelta(seconds=60)


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


@pytest.fixture
def demand(clock: MovedClock) -> PoolStats:
    demand = PoolStats(clock, WINDOW)
    demand.keep({"a"})
    return demand


def test_the_rate_is_that_of_the_window(demand: PoolStats, clock: MovedClock) -> None:
    for _ in range(30):
        demand.taken("a", hit=True)
    assert demand.rate("a") == 0.5
    clock.time += WINDOW / 2
    for _ in range(30):
        demand.taken("a", hit=False)
    assert demand.rate("a") == 1.0
    clock.time += WINDOW / 2
    assert demand.rate("a") == 0.5
    clock.time += WINDOW / 2
    assert (demand.rate("a"), demand.burst("a")) == (0.0, 0)
    assert demand.counts("a") == (30, 30)


def test_a_burst_is_what_came_at_once(demand: PoolStats, clock: MovedClock) -> None:
    for many in (1, 5, 2):
        for _ in range(many):
            demand.taken("a", hit=True)
        clock.time += timedelta(seconds=2)
    assert demand.burst("a") == 5


def test_while_a_start_takes_long_more_comes_at_once(demand: PoolStats, clock: MovedClock) -> None:
    demand.started("a", 10.0, None)
    for many in (1, 5, 2):
        for _ in range(many):
            demand.taken("a", hit=True)
        clock.time += timedelta(seconds=2)
    assert demand.burst("a") == 8


def test_more_creates_than_are_remembered_count_by_their_pace(
    demand: PoolStats, clock: MovedClock
) -> None:
    for _ in range(3 * CREATES):
        demand.taken("a", hit=True)
        clock.time += timedelta(milliseconds=1)
    assert demand.rate("a") == pytest.approx(1000, rel=0.01)
    assert demand.burst("a") == pytest.approx(1000, rel=0.01)


def test_a_start_takes_what_the_middle_one_took(demand: PoolStats) -> None:
    assert demand.start_seconds("a") is None
    assert demand.memory("a") is None
    for seconds, memory in ((0.1, 7), (9.0, 900), (0.2, 8)):
        demand.started("a", seconds, memory)
    demand.started("a", 0.15, None)
    assert demand.start_seconds("a") == pytest.approx(0.175)
    assert demand.memory("a") == 8


def test_a_template_without_a_pool_is_not_remembered(demand: PoolStats) -> None:
    demand.taken("b", hit=False)
    demand.started("b", 1.0, 1)
    assert (demand.counts("b"), demand.rate("b"), demand.start_seconds("b")) == ((0, 0), 0.0, None)
    demand.taken("a", hit=True)
    demand.keep({"b"})
    demand.keep({"a"})
    assert demand.counts("a") == (0, 0)
