"""The lifecycle commands of sessions, against a fake server."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from atoll.cli.sessions import next_change
from atoll.sdk.values import Limits, SessionInfo
from tests.component.sdk.fake_server import REQUESTED_STATE, problem

if TYPE_CHECKING:
    from tests.component.cli.conftest import Command
    from tests.component.sdk.fake_server import FakeServer

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize("verb", REQUESTED_STATE)
def test_sessions_reach_the_requested_state(
    atoll: Command, fake_server: FakeServer, verb: str
) -> None:
    first, second = (atoll("session", "create").stdout.strip() for _ in range(2))

    done = atoll("session", verb, first, second)

    assert (done.exit_code, done.stdout) == (
        0, f"{first} {REQUESTED_STATE[verb]}\n{second} {REQUESTED_STATE[verb]}\n",
    )  # fmt: skip
    content = json.loads(atoll("session", verb, first, "--json").stdout)
    assert [(one["id"], one["wanted"]) for one in content] == [(first, REQUESTED_STATE[verb])]


def test_an_expired_wait_is_not_an_error(atoll: Command, fake_server: FakeServer) -> None:
    session = atoll("session", "create").stdout.strip()
    fake_server.becoming = [{"status": "archiving"}]

    done = atoll("session", "archive", session, "--wait", "0")

    assert (done.exit_code, done.stdout) == (0, f"{session} archiving\n")
    assert fake_server.waits == [0]
    assert atoll("session", "stop", session, "--wait", "-1").exit_code == 2


def test_completed_work_is_printed_before_an_error(atoll: Command, fake_server: FakeServer) -> None:
    session = atoll("session", "create").stdout.strip()
    fake_server.becoming = [{}, problem(409, "session_busy", "Something runs in it.")]

    done = atoll("session", "pause", session, session)

    assert (done.exit_code, done.stdout) == (1, f"{session} paused\n")
    assert done.stderr == "error: Something runs in it. (session_busy)\n"
    assert atoll("session", "start", "none").exit_code == 1


def test_a_session_is_updated_extended_and_cloned(atoll: Command, fake_server: FakeServer) -> None:
    made = atoll(
        "session", "create", "--label", "a=b", "--no-auto-start", "--idle-timeout", "0",
        "--archive-after", "5", "--delete-after", "6",
    )  # fmt: skip
    session = made.stdout.strip()
    change = (
        "--memory", "1Gi", "-e", "A=b", "--no-env", "C", "--label", "x=y=z", "--no-label", "a",
        "--auto-start",
    )  # fmt: skip
    assert atoll("session", "update", session, *change).stdout == f"{session}\n"
    assert atoll("session", "extend", session, "60").stdout == "2024-05-01 12:00:00+00:00\n"
    copy = atoll("session", "clone", session, *change).stdout.strip()
    assert copy in fake_server.sessions
    assert copy != session
    atoll("session", "stop", session)
    assert atoll("session", "extend", session, "60").stdout == "60 seconds after its next start\n"

    body = {
        "memory": "1Gi",
        "env_vars": {"A": "b", "C": None},
        "labels": {"x": "y=z", "a": None},
        "auto_start": True,
    }
    assert fake_server.bodies == [
        {
            "labels": {"a": "b"},
            "auto_start": False,
            "idle_timeout": 0,
            "archive_after": 5,
            "delete_after": 6,
        },
        body,
        {"timeout": 60},
        body,
        {"timeout": 60},
    ]
    assert json.loads(atoll("session", "update", session, "--json").stdout)["id"] == session


@pytest.mark.parametrize(
    "words",
    [
        ("update", "s", "--label", "a"),
        ("update", "s", "--label", "=a"),
        ("update", "s", "--idle-timeout", "-1"),
        ("extend", "s", "0"),
        ("extend", "s"),
        ("stop",),
    ],
)
def test_contradictory_options_are_refused_by_the_client(
    atoll: Command, fake_server: FakeServer, words: tuple[str, ...]
) -> None:
    assert atoll("session", *words).exit_code == 2
    assert fake_server.requests == []


def test_show_starts_with_the_state(atoll: Command, fake_server: FakeServer) -> None:
    session = atoll("session", "create").stdout.strip()
    fake_server.sessions[session] |= {
        "status": "error", "wanted": "archived", "observed": "error", "cause": "driver",
        "message": "The bucket is gone.", "failures": 4, "retry_at": "2024-05-01T12:01:00Z",
    }  # fmt: skip

    lines = atoll("session", "show", session).stdout.splitlines()

    assert [line.split(None, 1)[1].strip() for line in lines[:7]] == [
        session, "error", "archived", "error", "driver", "The bucket is gone.",
        "retries at 2024-05-01 12:01:00+00:00",
    ]  # fmt: skip


def session_info(**options: Any) -> SessionInfo:
    fields: dict[str, Any] = {
        "id": "s", "template_id": "t", "status": "running", "wanted": "running",
        "runtime_type": "local", "runtime_node": "local", "resources": Limits("1", "1", "1", 1),
        "timeout": 60, "created_at": NOON, "updated_at": NOON, "expires_at": NOON,
    }  # fmt: skip
    return SessionInfo(**fields | options)


RESTING = {"status": "stopped", "expires_at": None, "rested_at": NOON}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param({}, "ends (timeout) at 2024-05-01 12:00:00+00:00", id="life"),
        pytest.param(
            {"expires_at": NOON.replace(hour=13), "active_at": NOON, "idle_timeout": 60},
            "stops (idle) at 2024-05-01 12:01:00+00:00",
            id="idle",
        ),
        pytest.param(RESTING, "", id="at-rest"),
        pytest.param(
            RESTING | {"archive_after": 60, "delete_after": 61},
            "is archived at 2024-05-01 12:01:00+00:00",
            id="archive",
        ),
        pytest.param(
            RESTING | {"status": "archived", "archive_after": 60, "delete_after": 61},
            "ends (idle) at 2024-05-01 12:01:01+00:00",
            id="delete",
        ),
        pytest.param({"ended_at": NOON, "status": "timeout"}, "", id="ended"),
    ],
)
def test_show_prints_the_next_automatic_change(given: dict[str, Any], said: str) -> None:
    assert next_change(session_info(**given)) == said
