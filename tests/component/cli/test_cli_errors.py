"""Errors of commands with `--json`: an object on stderr, with the same exit codes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.component.sdk.fake_server import problem

if TYPE_CHECKING:
    from typer.testing import Result

    from tests.component.cli.conftest import Command
    from tests.component.sdk.fake_server import FakeServer


def error_of(done: Result, status: int) -> dict[str, Any]:
    assert (done.exit_code, done.stdout) == (status, "")
    assert done.stderr.count("\n") == 1
    error: dict[str, Any] = json.loads(done.stderr)
    assert sorted(error) == ["code", "details", "message"]
    return error


def test_an_error_of_the_server_is_json(atoll: Command, fake_server: FakeServer) -> None:
    fake_server.failure = problem(422, "invalid_request", "cpu: no\x1b[31m number.", field="cpu")
    error = error_of(atoll("session", "create", "--json"), 1)
    assert error == {
        "code": "invalid_request",
        "message": "cpu: no\x1b[31m number.",
        "details": {"field": "cpu"},
    }


def test_an_error_of_the_client_is_json(
    atoll: Command, fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch, nowhere: str
) -> None:
    error = error_of(atoll("session", "show", "sess_1", "--json", "--url", "ftp://a"), 1)
    assert error["code"] == "invalid_url"
    error = error_of(atoll("session", "show", "sess_1", "--json", "--url", nowhere), 1)
    assert error["code"] == "server_unreachable"


@pytest.mark.parametrize(
    "words",
    [
        ("session", "create", "--json", "--colour", "red"),
        ("session", "create", "--json", "--capacity", "many"),
        ("session", "show", "--json"),
        ("session", "destroy", "--json"),
        ("session", "create", "--json", "--env", "=1"),
    ],
    ids=["option", "value", "argument", "command", "own check"],
)
def test_a_usage_error_is_json(
    atoll: Command, fake_server: FakeServer, words: tuple[str, ...]
) -> None:
    error = error_of(atoll(*words), 2)
    assert error["code"] == "usage"
    assert error["details"]["command"].split()[1] == "session"


def test_errors_are_lines_without_json(atoll: Command, fake_server: FakeServer) -> None:
    fake_server.failure = problem(422, "invalid_request", "cpu: no number.")
    assert atoll("session", "create", "--json").stderr.startswith("{")
    assert atoll("session", "create").stderr == "error: cpu: no number. (invalid_request)\n"
    done = atoll("session", "exec", "sess_1", "--colour", "--", "ls", "--json")
    assert done.exit_code == 2
    assert done.stderr.startswith("Usage:")


def test_an_error_about_a_refused_key_contains_the_source_of_the_key(
    atoll: Command, fake_server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_API_KEY", "another-key")
    error = error_of(atoll("session", "list", "--json"), 1)
    assert error["code"] == "unauthenticated"
    assert error["message"].endswith("The key is from ATOLL_API_KEY.")
    done = atoll("session", "list", "--api-key", "a-third-key")
    assert "The key is from the api_key argument (--api-key)." in done.stderr
