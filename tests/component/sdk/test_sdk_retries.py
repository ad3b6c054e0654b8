"""Repeated requests: which ones the client repeats, and with which key or id."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
from starlette.responses import Response

from atoll import Atoll, Conflict, NotFound, TemporaryError
from atoll.sdk.retry import Backoff
from tests.component.sdk.fake_server import KEY, problem

if TYPE_CHECKING:
    from tests.component.sdk.fake_server import FakeServer


def test_a_request_has_an_idempotency_key_only_if_given_one(
    atoll: Atoll, fake_server: FakeServer
) -> None:
    atoll.sessions.create()
    session = atoll.sessions.create(idempotency_key="mine")
    session.run("1")
    session.run("2", idempotency_key="a")
    session.run("3", on_stdout=print, idempotency_key="b")
    session.submit("4")
    session.submit("5", idempotency_key="c")
    assert fake_server.keys == [None, "mine", None, "a", "b", None, "c"]


def test_a_request_with_a_key_is_repeated_until_it_succeeds(
    atoll: Atoll, fake_server: FakeServer
) -> None:
    session = atoll.sessions.create()
    fake_server.keys.clear()
    fake_server.lost_answers, fake_server.in_flight = 2, 1
    assert session.run("1", idempotency_key="k").stdout == "1"
    assert fake_server.keys == ["k"] * 4

    fake_server.keys.clear()
    fake_server.lost_answers = 1
    atoll.sessions.create(idempotency_key="s")
    assert fake_server.keys == ["s", "s"]


def test_a_request_without_a_key_or_id_is_sent_once(atoll: Atoll, fake_server: FakeServer) -> None:
    atoll.sessions.create()
    fake_server.keys.clear()
    fake_server.lost_answers = 1
    with pytest.raises(TemporaryError) as raised:
        atoll.sessions.create()
    assert raised.value.code == "server_unreachable"
    assert fake_server.keys == [None]


def test_a_run_has_an_execution_id_and_is_repeated(atoll: Atoll, fake_server: FakeServer) -> None:
    session = atoll.sessions.create()
    fake_server.keys.clear()
    fake_server.bodies.clear()
    fake_server.lost_answers = 2
    assert session.run("1").stdout == "1"
    session.invoke(code="2")
    assert fake_server.keys == [None] * 4
    first, second = (body["execution_id"] for body in fake_server.bodies)
    assert first != second


@pytest.mark.parametrize("method", ["run", "submit", "on_stdout"])
def test_how_a_result_is_awaited_is_not_part_of_the_body(
    atoll: Atoll, fake_server: FakeServer, method: str
) -> None:
    """A key may be used by any of them: the server compares the bodies."""
    session = atoll.sessions.create()
    fake_server.bodies.clear()
    if method == "submit":
        session.submit("1", idempotency_key="k")
    elif method == "run":
        session.run("1", idempotency_key="k")
    else:
        session.run("1", on_stdout=print, idempotency_key="k")
    assert fake_server.bodies == [{"code": "1", "language": "python"}]


@pytest.mark.parametrize(
    "answer",
    [
        problem(503, "shutting_down"),
        Response("<html>Bad Gateway</html>", 502, media_type="text/html"),
    ],
    ids=["server", "gateway"],
)
def test_requests_wait_for_a_restarting_server(
    atoll: Atoll, fake_server: FakeServer, answer: Response
) -> None:
    session = atoll.sessions.create()
    fake_server.instead = [answer, answer]
    assert session.run("1").stdout == "1"
    fake_server.instead = [answer]
    assert session.refresh().id == session.id
    # A request that a repetition would run again is not repeated.
    fake_server.instead = [answer]
    with pytest.raises(TemporaryError):
        atoll.sessions.create()


def test_a_deletion_whose_response_is_lost_succeeds(atoll: Atoll, fake_server: FakeServer) -> None:
    session = atoll.sessions.create()
    session.files.write("a", "text")
    fake_server.undelivered = 1
    session.files.remove("a")
    assert "a" not in fake_server.files
    with pytest.raises(NotFound):
        session.files.remove("a")


def test_a_conditional_request_is_not_repeated(atoll: Atoll, fake_server: FakeServer) -> None:
    session = atoll.sessions.create()
    fake_server.undelivered = 1
    session.files.write("a", "text")
    fake_server.undelivered = 1
    with pytest.raises(TemporaryError) as raised:
        session.files.write("b", "text", overwrite=False)
    assert raised.value.code == "server_unreachable"
    assert pickle.loads(pickle.dumps(raised.value)).code == "server_unreachable"


def test_a_server_that_never_responded_is_not_retried() -> None:
    with Atoll("http://127.0.0.1:1", api_key=KEY) as atoll, pytest.raises(TemporaryError):
        atoll.sessions.create()


def test_a_refused_request_is_not_repeated(atoll: Atoll, fake_server: FakeServer) -> None:
    fake_server.failure = problem(409, "conflict")
    with pytest.raises(Conflict):
        atoll.sessions.create(idempotency_key="k")
    fake_server.failure = problem(503, "database_unavailable")
    with pytest.raises(TemporaryError):
        atoll.sessions.create(idempotency_key="k")
    assert len(fake_server.keys) == 2


def test_a_request_that_stays_in_flight_times_out(
    atoll: Atoll, fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "limit", 0.0)
    fake_server.in_flight = 10
    with pytest.raises(Conflict) as raised:
        atoll.sessions.create(idempotency_key="k")
    assert raised.value.code == "idempotency_in_flight"
