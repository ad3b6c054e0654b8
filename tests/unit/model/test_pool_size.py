"""How large a pool is to be, by the demand, and all pools together, by the node's memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.model.pool_size import Level, PoolDemand, limits, need, share_memory, smooth
from tests.contract.stores.store_entities import make_template

rates = st.floats(0, 1e4)
seconds = st.floats(0, 600)
counts = st.integers(0, 500)

NEEDS = {
    "nobody asks": ((0.0, 0.1, 0), 0),
    "now and then": ((1 / 60, 0.1, 1), 1),
    "ten at once": ((10 / 60, 0.1, 10), 10),
    "five a second, each a tenth to start": ((5.0, 0.1, 6), 6),
    "one a second, each a second to start": ((1.0, 1.0, 2), 6),
    "faster than a refill can be": ((100.0, 1.0, 100), 2400),
}


@pytest.mark.parametrize(("given_", "expected"), NEEDS.values(), ids=NEEDS)
def test_the_need_follows_from_rate_start_and_bursts(
    given_: tuple[float, float, int], expected: int
) -> None:
    rate, start, burst = given_
    assert need(rate, start, burst=burst, concurrency=2) == expected


@given(one=rates, other=rates, start=seconds, burst=counts, concurrency=st.integers(1, 16))
def test_a_higher_rate_never_lowers_the_target(
    one: float, other: float, start: float, burst: int, concurrency: int
) -> None:
    low, high = sorted((one, other))
    few, many = (need(r, start, burst=burst, concurrency=concurrency) for r in (low, high))
    assert few <= many


@given(rate=rates, one=seconds, other=seconds)
def test_a_longer_start_never_lowers_the_target(rate: float, one: float, other: float) -> None:
    short, long = sorted((one, other))
    assert need(rate, short) <= need(rate, long)


@given(rate=rates, start=seconds, burst=counts)
def test_requests_that_arrive_during_a_start_are_covered(
    rate: float, start: float, burst: int
) -> None:
    assert need(rate, start, burst=burst) >= max(rate * start, burst)


BOUNDS = {
    "no pool": ((0, None), (0, 0)),
    "grows by itself": ((2, None), (2, 50)),
    "fixed": ((2, 2), (2, 2)),
    "only when asked for": ((0, 5), (0, 5)),
    "the settings have been lowered": ((2, 100), (2, 50)),
    "they are below its minimum": ((60, None), (60, 60)),
}


@pytest.mark.parametrize(("template", "expected"), BOUNDS.values(), ids=BOUNDS)
def test_the_bounds_of_a_template_stay_within_the_settings(
    template: tuple[int, int | None], expected: tuple[int, int]
) -> None:
    least, most = template
    assert limits(replace(make_template(), pool_size=least, pool_max=most), 50) == expected


def test_a_level_rises_at_once_and_falls_by_halves() -> None:
    level = smooth(Level(2, 0.0), 50, 1.0, 10.0)
    seen = [level.target]
    for now in (5.0, 11.0, 15.0, 21.0, 31.0, 41.0, 51.0, 61.0, 71.0, 81.0):
        level = smooth(level, 2, now, 10.0)
        seen.append(level.target)

    assert seen == [50, 50, 26, 26, 14, 8, 5, 3, 2, 2, 2]


@given(wanted=st.lists(counts, min_size=1), pause=st.floats(0.1, 100))
def test_a_level_stays_between_the_current_and_the_highest_demand(
    wanted: list[int], pause: float
) -> None:
    level = Level(0, 0.0)
    for now, each in enumerate(wanted):
        level = smooth(level, each, float(now), pause)
        assert each <= level.target <= max(wanted)


@given(start=counts, wanted=counts)
def test_a_level_settles_at_the_demand(start: int, wanted: int) -> None:
    level = Level(start, 0.0)
    for turn in range(1, 12):
        level = smooth(level, wanted, float(turn), 1.0)
    assert level.target == wanted


@given(around=st.integers(2, 50))
def test_demand_that_varies_within_a_pause_changes_nothing(around: int) -> None:
    level = Level(around, 0.0)
    for now in range(100):
        level = smooth(level, around - now % 2, float(now), 4.0)
        assert level.target == around


SHARES = {
    "enough for all": ([PoolDemand(2, 10, 8), PoolDemand(1, 5, 8)], 1000, [10, 5]),
    "minimums alone are too much": ([PoolDemand(2, 10, 8), PoolDemand(1, 5, 8)], 10, [2, 1]),
    "alike above the minimum": ([PoolDemand(2, 10, 1), PoolDemand(0, 10, 1)], 10, [6, 4]),
    "counted by memory": ([PoolDemand(0, 10, 1), PoolDemand(0, 10, 4)], 16, [8, 2]),
    "little demand leaves memory to others": (
        [PoolDemand(0, 1, 1), PoolDemand(0, 9, 1)],
        7,
        [1, 6],
    ),
    "what does not fit is left to others": (
        [PoolDemand(0, 1, 50), PoolDemand(0, 9, 1)],
        7,
        [0, 7],
    ),
    "less than nothing": ([PoolDemand(1, 4, 8)], -5, [1]),
    "no pools": ([], 100, []),
}


@pytest.mark.parametrize(("wants", "budget", "expected"), SHARES.values(), ids=SHARES)
def test_minimums_get_memory_first(
    wants: list[PoolDemand], budget: int, expected: list[int]
) -> None:
    assert share_memory(wants, budget) == expected


asked = st.lists(
    st.builds(
        lambda least, above, memory: PoolDemand(least, least + above, memory),
        st.integers(0, 10),
        st.integers(0, 30),
        st.integers(1, 600),
    ),
    max_size=8,
)
budgets = st.integers(-100, 40_000)


def used(wants: list[PoolDemand], granted: list[int]) -> int:
    return sum(want.memory * many for want, many in zip(wants, granted, strict=True))


@given(wants=asked, budget=budgets)
def test_all_pools_together_stay_within_the_budget_unless_minimums_exceed_it(
    wants: list[PoolDemand], budget: int
) -> None:
    granted = share_memory(wants, budget)
    least = [want.least for want in wants]

    assert used(wants, granted) <= budget or granted == least
    for want, many in zip(wants, granted, strict=True):
        assert want.least <= many <= want.target


@given(wants=asked, budget=budgets)
def test_the_remaining_budget_is_used_completely(wants: list[PoolDemand], budget: int) -> None:
    granted = share_memory(wants, budget)
    left = budget - used(wants, granted)

    for want, many in zip(wants, granted, strict=True):
        assert many == want.target or want.memory > left


@given(wants=asked, budget=budgets)
def test_a_pool_below_its_target_has_no_less_memory_than_the_others(
    wants: list[PoolDemand], budget: int
) -> None:
    granted = share_memory(wants, budget)
    extra = [(many - want.least) * want.memory for want, many in zip(wants, granted, strict=True)]

    for want, many, mine in zip(wants, granted, extra, strict=True):
        if many < want.target:
            # But for the last one of each, which fitted or did not.
            assert all(
                theirs <= mine + other.memory or other.memory < want.memory
                for other, theirs in zip(wants, extra, strict=True)
            )
