"""Sessions that are started, stopped, changed and copied: what the client does about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from atoll import Conflict, TemporaryError
from tests.component.sdk.outside import BECOMES, problem

if TYPE_CHECKING:
    from atoll import Atoll
    from tests.component.sdk.outside import Outside


@pytest.mark.parametrize("verb", BECOMES)
def test_a_session_becomes_what_is_asked_for(atoll: Atoll, outside: Outside, verb: str) -> None:
    session = atoll.sessions.create()

    info = getattr(session, verb)()

    assert (info.status, info.wanted) == (BECOMES[verb], BECOMES[verb])
    assert session.info is info
    assert (info.expires_at is None) == (verb in ("stop", "archive"))
    assert outside.requests[-1] == ("POST", f"/api/v1/sessions/{session.id}/{verb}")
    assert outside.waits == [60]


def test_what_takes_long_is_asked_for_again_until_it_is_so(atoll: Atoll, outside: Outside) -> None:
    session = atoll.sessions.create()
    outside.becoming = [{"status": "stopping"}, {"status": "archiving"}]

    assert session.archive().status == "archived"
    assert len(outside.waits) == 3


def test_a_wait_that_is_over_ends_with_what_the_session_is(atoll: Atoll, outside: Outside) -> None:
    session = atoll.sessions.create()
    outside.becoming = [{"status": "stopping"}]

    assert session.stop(wait=0).status == "stopping"
    assert outside.waits == [0]


def test_an_archived_session_that_is_stopped_is_left_so(atoll: Atoll, outside: Outside) -> None:
    session = atoll.sessions.create()
    outside.becoming = [{"status": "archived", "wanted": "archived"}]

    assert session.stop().status == "archived"


def test_somebody_who_wants_otherwise_is_not_fought(atoll: Atoll, outside: Outside) -> None:
    session = atoll.sessions.create()
    outside.becoming = [{"status": "stopping"}, {"status": "stopping", "wanted": "running"}]

    assert session.stop().wanted == "running"
    assert len(outside.waits) == 2


def test_a_session_in_line_to_be_archived_is_waited_for(atoll: Atoll, outside: Outside) -> None:
    session = atoll.sessions.create()
    busy = problem(503, "archive_busy")
    busy.headers["retry-after"] = "0"
    outside.becoming = [busy]

    assert session.archive().status == "archived"
    assert len(outside.waits) == 2


def test_a_wait_in_line_ends_when_it_is_over(atoll: Atoll, outside: Outside) -> None:
    session = atoll.sessions.create()
    outside.becoming = [problem(503, "archive_busy")]

    info = session.archive(wait=0)

    assert (info.status, info.wanted) == ("running", "archived")


def test_what_cannot_be_is_raised(atoll: Atoll, outside: Outside) -> None:
    session = atoll.sessions.create()
    outside.becoming = [problem(409, "session_busy"), problem(503, "session_not_ready")]

    with pytest.raises(Conflict) as refused:
        session.pause()
    assert refused.value.code == "session_busy"
    with pytest.raises(TemporaryError):
        session.start()


def test_what_is_given_is_changed_and_nothing_else(atoll: Atoll, outside: Outside) -> None:
    session = atoll.sessions.create()

    session.update(cpu=0.5, memory=2**30, env={"A": "b", "C": None}, auto_start=False)
    session.update(labels={"a": "b"}, idle_timeout=0, archive_after=5, delete_after=6)
    assert session.extend(90).timeout == 90

    assert outside.bodies[1:] == [
        {
            "cpu": "0.5",
            "memory": "1073741824",
            "env_vars": {"A": "b", "C": None},
            "auto_start": False,
        },
        {"labels": {"a": "b"}, "idle_timeout": 0, "archive_after": 5, "delete_after": 6},
        {"timeout": 90},
    ]
    assert outside.requests[-1] == ("PATCH", f"/api/v1/sessions/{session.id}")


def test_a_clone_is_another_session(atoll: Atoll, outside: Outside) -> None:
    session = atoll.sessions.create()

    copy = session.clone(memory="1Gi", labels={"of": session.id}, idempotency_key="k")

    assert copy.id != session.id
    assert copy.info.started_from == session.id
    assert outside.bodies[-1] == {"memory": "1Gi", "labels": {"of": session.id}}
    assert outside.keys[-1] == "k"


def test_a_session_is_made_with_its_timers(atoll: Atoll, outside: Outside) -> None:
    with atoll.session(
        labels={"a": "b"}, auto_start=False, idle_timeout=0, archive_after=1, delete_after=2
    ) as session:
        session.stop()

    assert outside.bodies == [
        {
            "labels": {"a": "b"},
            "auto_start": False,
            "idle_timeout": 0,
            "archive_after": 1,
            "delete_after": 2,
        }
    ]
    assert outside.sessions[session.id]["status"] == "terminated"
