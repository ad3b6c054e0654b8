"""The table has a step for every session, and a sequence of steps ends."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.model import plan
from atoll.model.plan import TABLE, Observed, Step
from atoll.model.resources import Resources
from atoll.model.session import ENDED, Cause, Session, SessionStatus, Wanted

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
LONGEST_WAY = 6
"""Steps."""

LEADS_TO: dict[Step, tuple[Observed, ...]] = {
    Step.START: (Observed.STARTING, Observed.RESTORING, Observed.RUNNING),
    Step.RESUME: (Observed.RUNNING,),
    # A session whose instance has died has no memory to keep, and starts again before it stops.
    Step.PAUSE: (Observed.PAUSING, Observed.PAUSED, Observed.RUNNING),
    Step.STOP: (Observed.STOPPING, Observed.STOPPED),
    Step.ARCHIVE: (Observed.ARCHIVING, Observed.ARCHIVED),
    Step.HEAL: (
        Observed.RUNNING, Observed.PAUSED, Observed.STARTING, Observed.STOPPING, Observed.STOPPED,
    ),
    Step.CLEAR: (Observed.DESTROYED,),
}  # fmt: skip
"""What a session may be after a step: the last of them when nothing goes wrong, but for `heal`."""


def session(**fields: Any) -> Session:
    base: dict[str, Any] = {
        "id": "s", "template_id": "python", "status": SessionStatus.RUNNING,
        "wanted": Wanted.RUNNING, "runtime_type": "local", "runtime_node": "here",
        "resources": Resources(cpu=1.0, memory=2**28, disk=2**28, max_processes=32),
        "timeout": 300, "created_at": NOW, "updated_at": NOW,
        "expires_at": NOW + timedelta(seconds=300), "instance_id": "i", "workspace": "w",
    }  # fmt: skip
    return Session(**(base | fields))


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


# The table


def test_every_pair_has_a_step() -> None:
    assert set(TABLE) == {(wanted, observed) for wanted in Wanted for observed in Observed}


@pytest.mark.parametrize("wanted", Wanted)
@pytest.mark.parametrize("observed", Observed)
def test_every_undisturbed_sequence_of_steps_settles(wanted: Wanted, observed: Observed) -> None:
    ways = [[observed]]
    while ways:
        way = ways.pop()
        step = TABLE[wanted, way[-1]]
        if step is Step.NONE:
            continue
        assert len(way) <= LONGEST_WAY, way
        # The observed state is determined once; afterwards each step has its effect.
        leads = LEADS_TO[step] if step is Step.HEAL else LEADS_TO[step][-1:]
        if step is Step.PAUSE:
            leads = (Observed.PAUSED,)
        ways += [[*way, following] for following in leads]


@given(st.sampled_from(Wanted), st.sampled_from(Observed), st.data())
def test_a_step_that_stops_halfway_or_fails_can_still_settle(
    wanted: Wanted, observed: Observed, data: st.DataObject
) -> None:
    for _ in range(8):
        step = TABLE[wanted, observed]
        if step is Step.NONE:
            break
        stays = (observed,) if step is Step.CLEAR else (observed, Observed.ERROR)
        observed = data.draw(st.sampled_from((*LEADS_TO[step], *stays)))
    seen = {observed}
    reached = [observed]
    while reached:
        step = TABLE[wanted, reached.pop()]
        if step is Step.NONE:
            return
        new = set(LEADS_TO[step]) - seen
        seen |= new
        reached += new
    pytest.fail(f"{wanted} is not reached from {observed}: {seen}")


@pytest.mark.parametrize(
    ("wanted", "at_rest"),
    [
        (Wanted.RUNNING, {Observed.RUNNING}),
        # Without an instance no memory can be kept.
        (Wanted.PAUSED, {Observed.PAUSED, Observed.STOPPED, Observed.ARCHIVED}),
        (Wanted.STOPPED, {Observed.STOPPED, Observed.ARCHIVED}),
        (Wanted.ARCHIVED, {Observed.ARCHIVED}),
        (Wanted.DESTROYED, set()),
    ],
    ids=["running", "paused", "stopped", "archived", "destroyed"],
)
def test_only_wanted_states_are_settled(wanted: Wanted, at_rest: set[Observed]) -> None:
    found = {observed for observed in Observed if TABLE[wanted, observed] is Step.NONE}

    assert found == at_rest | {Observed.DESTROYED}


@pytest.mark.parametrize("status", SessionStatus)
def test_every_status_is_observed(status: SessionStatus) -> None:
    found = plan.observed(session(status=status))

    assert found == (Observed.DESTROYING if status.ended else Observed(status.value))


@pytest.mark.parametrize("status", sorted(ENDED))
@pytest.mark.parametrize(
    ("left", "step"),
    [
        ({}, Step.CLEAR),
        ({"instance_id": None}, Step.CLEAR),
        ({"workspace": None}, Step.CLEAR),
        ({"instance_id": None, "workspace": None}, Step.NONE),
    ],
    ids=["both", "workspace", "instance", "nothing"],
)
@pytest.mark.parametrize("wanted", Wanted)
def test_an_ended_session_is_cleared_until_nothing_is_left(
    status: SessionStatus, left: dict[str, None], step: Step, wanted: Wanted
) -> None:
    assert plan.next_step(session(status=status, wanted=wanted, **left)) is step


# Timers

LIFE = (after(300), Wanted.DESTROYED, Cause.TIMEOUT)
STOPPED: dict[str, Any] = {
    "status": SessionStatus.STOPPED, "wanted": Wanted.STOPPED, "rested_at": after(10),
    "instance_id": None,
}  # fmt: skip
ARCHIVED: dict[str, Any] = STOPPED | {
    "status": SessionStatus.ARCHIVED, "wanted": Wanted.ARCHIVED, "workspace": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, LIFE, id="its life"),
        pytest.param({"status": SessionStatus.PAUSED, "wanted": Wanted.PAUSED}, LIFE, id="paused"),
        pytest.param(
            {"idle_timeout": 60, "active_at": after(20)},
            (after(80), Wanted.STOPPED, Cause.IDLE),
            id="idle",
        ),
        pytest.param(
            {"idle_timeout": 60}, (after(60), Wanted.STOPPED, Cause.IDLE), id="never active"
        ),
        pytest.param({"idle_timeout": 60, "active_at": after(250)}, LIFE, id="life before idle"),
        pytest.param({"archive_after": 1, "delete_after": 1}, LIFE, id="not at rest"),
        pytest.param(STOPPED, None, id="stopped, for ever"),
        pytest.param(
            STOPPED | {"archive_after": 60},
            (after(70), Wanted.ARCHIVED, Cause.IDLE),
            id="stopped, to be archived",
        ),
        pytest.param(
            STOPPED | {"archive_after": 60, "delete_after": 50},
            (after(60), Wanted.DESTROYED, Cause.IDLE),
            id="deleted before it is archived",
        ),
        pytest.param(
            STOPPED | {"archive_after": 60, "delete_after": 600},
            (after(70), Wanted.ARCHIVED, Cause.IDLE),
            id="archived before it is deleted",
        ),
        pytest.param(STOPPED | {"idle_timeout": 1, "timeout": 1}, None, id="no life at rest"),
        pytest.param(
            ARCHIVED | {"archive_after": 60, "delete_after": 600},
            (after(610), Wanted.DESTROYED, Cause.IDLE),
            id="archived already",
        ),
        pytest.param({"status": SessionStatus.STARTING}, None, id="not settled"),
        pytest.param({"status": SessionStatus.ERROR, "idle_timeout": 1}, None, id="in error"),
        pytest.param({"status": SessionStatus.TIMEOUT, "wanted": Wanted.DESTROYED}, None, id="end"),
        pytest.param(
            STOPPED | {"archive_after": 10**12},
            (datetime.max.replace(tzinfo=UTC), Wanted.ARCHIVED, Cause.IDLE),
            id="later than any date",
        ),
    ],
)
def test_the_earliest_timer_is_returned(
    fields: dict[str, Any], expected: tuple[datetime, Wanted, Cause] | None
) -> None:
    found = plan.timer(session(**fields))

    assert (None if found is None else (found.at, found.wanted, found.cause)) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, after(300), id="its life"),
        pytest.param({"status": SessionStatus.STARTING}, after(300), id="a start that hangs"),
        pytest.param({"status": SessionStatus.ERROR}, after(300), id="in error"),
        pytest.param(
            {"status": SessionStatus.STARTING, "idle_timeout": 1}, after(300), id="idle waits"
        ),
        pytest.param(
            STOPPED | {"wanted": Wanted.RUNNING, "delete_after": 1}, None, id="about to start"
        ),
        pytest.param(
            {"status": SessionStatus.STOPPING, "wanted": Wanted.STOPPED, "rested_at": NOW},
            None,
            id="about to rest",
        ),
        pytest.param(
            STOPPED | {"status": SessionStatus.ERROR, "delete_after": 5},
            after(15),
            id="cannot come to rest",
        ),
        pytest.param(
            STOPPED | {"wanted": Wanted.ARCHIVED, "delete_after": 5},
            after(15),
            id="cannot be archived",
        ),
        pytest.param(STOPPED | {"delete_after": 5}, after(15), id="at rest"),
        pytest.param({"status": SessionStatus.FAILED, "wanted": Wanted.DESTROYED}, None, id="end"),
    ],
)
def test_timer_at_is_the_time_of_the_next_timer(
    fields: dict[str, Any], expected: datetime | None
) -> None:
    assert plan.timer_at(session(**fields)) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, None, id="runs"),
        pytest.param(STOPPED, None, id="stopped"),
        pytest.param({"status": SessionStatus.STARTING}, NOW, id="on its way"),
        pytest.param(
            {"status": SessionStatus.ERROR, "retry_at": after(60)}, after(60), id="tried later"
        ),
        pytest.param({"wanted": Wanted.STOPPED}, NOW, id="wanted otherwise"),
        pytest.param(
            {"status": SessionStatus.FAILED, "wanted": Wanted.DESTROYED}, NOW, id="not cleared"
        ),
        pytest.param(
            {
                "status": SessionStatus.FAILED,
                "wanted": Wanted.DESTROYED,
                "instance_id": None,
                "workspace": None,
                "retry_at": after(60),
            },
            None,
            id="cleared",
        ),
    ],
)
def test_unsettled_at_is_the_time_of_the_next_step(
    fields: dict[str, Any], expected: datetime | None
) -> None:
    assert plan.unsettled_at(session(**fields)) == expected


@given(
    st.sampled_from(SessionStatus),
    st.sampled_from(Wanted),
    st.sampled_from([None, 1, 60, 10**9]),
    st.sampled_from([None, 1, 60, 10**9]),
    st.sampled_from([None, 1, 60, 10**9]),
)
def test_every_session_has_a_next_step_or_a_timer_or_is_kept_forever(
    status: SessionStatus,
    wanted: Wanted,
    idle: int | None,
    archive: int | None,
    delete: int | None,
) -> None:
    rests = status.stopped_or_archived
    given = session(
        status=status,
        wanted=wanted,
        rested_at=NOW if rests else None,
        idle_timeout=idle,
        archive_after=archive,
        delete_after=delete,
    )
    timer = plan.timer(given)
    if timer is not None:
        # Not a timer for what it is already: it would run out again and again.
        assert plan.TABLE[timer.wanted, plan.observed(given)] is not Step.NONE
        assert plan.unsettled_at(given) is None
        assert plan.timer_at(given) == timer.at
    elif plan.unsettled_at(given) is None:
        assert status.ended or (rests and delete is None)
