"""The sequences of steps in the documentation: each ends in a state without a next step."""

from __future__ import annotations

import itertools

import pytest

from atoll.model.plan import TABLE, Observed, Step, next_statuses
from atoll.model.session import Wanted

SETTLED = {
    Wanted.RUNNING: {Observed.RUNNING},
    # What has no instance has nothing to keep in memory, and is not made to have one.
    Wanted.PAUSED: {Observed.PAUSED, Observed.STOPPED, Observed.ARCHIVED},
    Wanted.STOPPED: {Observed.STOPPED, Observed.ARCHIVED},
    Wanted.ARCHIVED: {Observed.ARCHIVED},
    Wanted.DESTROYED: {Observed.DESTROYED},
}


def test_every_pair_has_a_step() -> None:
    assert set(TABLE) == set(itertools.product(Wanted, Observed))


@pytest.mark.parametrize("wanted", Wanted)
@pytest.mark.parametrize("observed", Observed)
def test_every_sequence_of_steps_ends_at_the_wanted_state(
    wanted: Wanted, observed: Observed
) -> None:
    allowed = SETTLED[wanted] | {Observed.DESTROYED}
    ways = [[observed]]
    while ways:
        way = ways.pop()
        step = TABLE[wanted, way[-1]]
        further = next_statuses(wanted, way[-1])
        assert (step is Step.NONE) == (not further)
        if not further:
            assert way[-1] in allowed
        for state in further:
            assert state not in way, f"{way} goes round by {state}"
            ways.append([*way, state])
