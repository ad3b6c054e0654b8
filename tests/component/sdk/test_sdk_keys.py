"""Requests with a key: sent again when the line breaks, since they are done once."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
from starlette.responses import Response

from atoll import Atoll, Conflict, NotFound, TemporaryError
from atoll.sdk.retry import Backoff
from tests.component.sdk.outside import KEY, problem

if TYPE_CHECKING:
    from tests.component.sdk.outside import Outside


def test_a_request_has_a_key_when_it_is_given_one(atoll: Atoll, outside: Outside) -> None:
    atoll.sessions.create()
    session = atoll.sessions.create(idempotency_key="mine")
    session.run("1")
    session.run("2", idempotency_key="a")
    session.run("3", on_stdout=print, idempotency_key="b")
    session.submit("4")
    session.submit("5", idempotency_key="c")
    assert outside.keys == [None, "mine", None, "a", "b", None, "c"]


def test_what_has_a_key_is_sent_again_until_there_is_an_answer(
    atoll: Atoll, outside: Outside
) -> None:
    session = atoll.sessions.create()
    outside.keys.clear()
    outside.lost_answers, outside.in_flight = 2, 1
    assert session.run("1", idempotency_key="k").stdout == "1"
    assert outside.keys == ["k"] * 4

    outside.keys.clear()
    outside.lost_answers = 1
    atoll.sessions.create(idempotency_key="s")
    assert outside.keys == ["s", "s"]


def test_what_has_neither_a_key_nor_an_id_is_sent_once(atoll: Atoll, outside: Outside) -> None:
    atoll.sessions.create()
    outside.keys.clear()
    outside.lost_answers = 1
    with pytest.raises(TemporaryError) as raised:
        atoll.sessions.create()
    assert raised.value.code == "server_unreachable"
    assert outside.keys == [None]


def test_what_is_run_has_an_id_and_is_sent_again(atoll: Atoll, outside: Outside) -> None:
    session = atoll.sessions.create()
    outside.keys.clear()
    outside.bodies.clear()
    outside.lost_answers = 2
    assert session.run("1").stdout == "1"
    session.invoke(code="2")
    assert outside.keys == [None] * 4
    first, second = (body["execution_id"] for body in outside.bodies)
    assert first != second


@pytest.mark.parametrize("method", ["run", "submit", "on_stdout"])
def test_how_a_result_is_waited_for_is_no_part_of_the_request(
    atoll: Atoll, outside: Outside, method: str
) -> None:
    """A key may be used by any of them: the server compares the bodies."""
    session = atoll.sessions.create()
    outside.bodies.clear()
    if method == "submit":
        session.submit("1", idempotency_key="k")
    elif method == "run":
        session.run("1", idempotency_key="k")
    else:
        session.run("1", on_stdout=print, idempotency_key="k")
    assert outside.bodies == [{"code": "1", "language": "python"}]


@pytest.mark.parametrize(
    "answer",
    [
        problem(503, "shutting_down"),
        Response("<html>Bad Gateway</html>", 502, media_type="text/html"),
    ],
    ids=["server", "gateway"],
)
def test_a_server_that_is_being_restarted_is_waited_for(
    atoll: Atoll, outside: Outside, answer: Response
) -> None:
    session = atoll.sessions.create()
    outside.instead = [answer, answer]
    assert session.run("1").stdout == "1"
    outside.instead = [answer]
    assert session.refresh().id == session.id
    # What is done again by a repeat is not repeated.
    outside.instead = [answer]
    with pytest.raises(TemporaryError):
        atoll.sessions.create()


def test_a_deletion_whose_answer_is_lost_is_done(atoll: Atoll, outside: Outside) -> None:
    session = atoll.sessions.create()
    session.files.write("a", "text")
    outside.undelivered = 1
    session.files.remove("a")
    assert "a" not in outside.files
    with pytest.raises(NotFound):
        session.files.remove("a")


def test_what_depends_on_what_was_there_is_not_repeated(atoll: Atoll, outside: Outside) -> None:
    session = atoll.sessions.create()
    outside.undelivered = 1
    session.files.write("a", "text")
    outside.undelivered = 1
    with pytest.raises(TemporaryError) as raised:
        session.files.write("b", "text", overwrite=False)
    assert raised.value.code == "server_unreachable"
    assert pickle.loads(pickle.dumps(raised.value)).code == "server_unreachable"


def test_a_server_that_was_never_there_is_not_waited_for() -> None:
    with Atoll("http://127.0.0.1:1", api_key=KEY) as atoll, pytest.raises(TemporaryError):
        atoll.sessions.create()


def test_a_refusal_is_not_asked_again(atoll: Atoll, outside: Outside) -> None:
    outside.failure = problem(409, "conflict")
    with pytest.raises(Conflict):
        atoll.sessions.create(idempotency_key="k")
    outside.failure = problem(503, "database_unavailable")
    with pytest.raises(TemporaryError):
        atoll.sessions.create(idempotency_key="k")
    assert len(outside.keys) == 2


def test_one_that_stays_in_flight_is_not_waited_for_forever(
    atoll: Atoll, outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backoff, "limit", 0.0)
    outside.in_flight = 10
    with pytest.raises(Conflict) as raised:
        atoll.sessions.create(idempotency_key="k")
    assert raised.value.code == "idempotency_in_flight"
