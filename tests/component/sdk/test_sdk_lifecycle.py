"""Start, stop, update and clone: how the client waits for the requested state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from atoll import Conflict, TemporaryError
from tests.component.sdk.fake_server import REQUESTED_STATE, problem

if TYPE_CHECKING:
    from atoll import Atoll
    from tests.component.sdk.fake_server import FakeServer


@pytest.mark.parametrize("verb", REQUESTED_STATE)
def test_a_session_reaches_the_requested_state(
    atoll: Atoll, fake_server: FakeServer, verb: str
) -> None:
    session = atoll.sessions.create()

    info = getattr(session, verb)()

    assert (info.status, info.wanted) == (REQUESTED_STATE[verb], REQUESTED_STATE[verb])
    assert session.info is info
    assert (info.expires_at is None) == (verb in ("stop", "archive"))
    assert fake_server.requests[-1] == ("POST", f"/api/v1/sessions/{session.id}/{verb}")
    assert fake_server.waits == [60]


def test_a_slow_transition_is_requested_until_it_is_complete(
    atoll: Atoll, fake_server: FakeServer
) -> None:
    session = atoll.sessions.create()
    fake_server.becoming = [{"status": "stopping"}, {"status": "archiving"}]

    assert session.archive().status == "archived"
    assert len(fake_server.waits) == 3


def test_an_expired_wait_returns_the_current_state(atoll: Atoll, fake_server: FakeServer) -> None:
    session = atoll.sessions.create()
    fake_server.becoming = [{"status": "stopping"}]

    assert session.stop(wait=0).status == "stopping"
    assert fake_server.waits == [0]


def test_stopping_an_archived_session_leaves_it_archived(
    atoll: Atoll, fake_server: FakeServer
) -> None:
    session = atoll.sessions.create()
    fake_server.becoming = [{"status": "archived", "wanted": "archived"}]

    assert session.stop().status == "archived"


def test_a_conflicting_request_of_another_client_ends_the_wait(
    atoll: Atoll, fake_server: FakeServer
) -> None:
    session = atoll.sessions.create()
    fake_server.becoming = [{"status": "stopping"}, {"status": "stopping", "wanted": "running"}]

    assert session.stop().wanted == "running"
    assert len(fake_server.waits) == 2


def test_a_queued_archive_request_is_awaited(atoll: Atoll, fake_server: FakeServer) -> None:
    session = atoll.sessions.create()
    busy = problem(503, "archive_busy")
    busy.headers["retry-after"] = "0"
    fake_server.becoming = [busy]

    assert session.archive().status == "archived"
    assert len(fake_server.waits) == 2


def test_a_queued_archive_request_honours_the_wait(atoll: Atoll, fake_server: FakeServer) -> None:
    session = atoll.sessions.create()
    fake_server.becoming = [problem(503, "archive_busy")]

    info = session.archive(wait=0)

    assert (info.status, info.wanted) == ("running", "archived")


def test_an_impossible_transition_raises(atoll: Atoll, fake_server: FakeServer) -> None:
    session = atoll.sessions.create()
    fake_server.becoming = [problem(409, "session_busy"), problem(503, "session_not_ready")]

    with pytest.raises(Conflict) as refused:
        session.pause()
    assert refused.value.code == "session_busy"
    with pytest.raises(TemporaryError):
        session.start()


def test_an_update_sends_only_the_given_options(atoll: Atoll, fake_server: FakeServer) -> None:
    session = atoll.sessions.create()

    session.update(cpu=0.5, memory=2**30, env={"A": "b", "C": None}, auto_start=False)
    session.update(labels={"a": "b"}, idle_timeout=0, archive_after=5, delete_after=6)
    assert session.extend(90).timeout == 90

    assert fake_server.bodies[1:] == [
        {
            "cpu": "0.5",
            "memory": "1073741824",
            "env_vars": {"A": "b", "C": None},
            "auto_start": False,
        },
        {"labels": {"a": "b"}, "idle_timeout": 0, "archive_after": 5, "delete_after": 6},
        {"timeout": 90},
    ]
    assert fake_server.requests[-1] == ("PATCH", f"/api/v1/sessions/{session.id}")


def test_a_clone_is_another_session(atoll: Atoll, fake_server: FakeServer) -> None:
    session = atoll.sessions.create()

    copy = session.clone(memory="1Gi", labels={"of": session.id}, idempotency_key="k")

    assert copy.id != session.id
    assert copy.info.started_from == session.id
    assert fake_server.bodies[-1] == {"memory": "1Gi", "labels": {"of": session.id}}
    assert fake_server.keys[-1] == "k"


def test_a_session_is_created_with_its_timers(atoll: Atoll, fake_server: FakeServer) -> None:
    with atoll.session(
        labels={"a": "b"}, auto_start=False, idle_timeout=0, archive_after=1, delete_after=2
    ) as session:
        session.stop()

    assert fake_server.bodies == [
        {
            "labels": {"a": "b"},
            "auto_start": False,
            "idle_timeout": 0,
            "archive_after": 1,
            "delete_after": 2,
        }
    ]
    assert fake_server.sessions[session.id]["status"] == "terminated"
