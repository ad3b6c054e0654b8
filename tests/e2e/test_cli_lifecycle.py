"""The lifecycle commands as processes, against a real server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.harness import Server

pytestmark = pytest.mark.quick


class Atoll:
    """The command."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        done = self._server.atoll("session", *arguments)
        return done.returncode, done.stdout, done.stderr

    def json(self, *arguments: str) -> Any:
        code, out, err = self(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)


@pytest.fixture
def atoll(server: Server) -> Atoll:
    return Atoll(server)


@pytest.fixture
def session(atoll: Atoll) -> Iterator[str]:
    words = ("--timeout", "600", "--idle-timeout", "500", "--label", "project=report")
    session = atoll("create", *words)[1].strip()
    yield session
    atoll("rm", session)


def test_a_session_is_stopped_and_started(atoll: Atoll, session: str) -> None:
    assert atoll("exec", session, "--", "sh", "-c", "echo hello > notes.txt")[0] == 0
    assert atoll("stop", session) == (0, f"{session} stopped\n", "")
    listed = [line.split() for line in atoll("list", "--status", "stopped")[1].splitlines()]
    assert [session, "stopped"] in [line[:2] for line in listed]
    shown = atoll.json("show", session)
    assert (shown["status"], shown["wanted"], shown["cause"]) == ("stopped", "stopped", "user")
    assert (shown["expires_at"], shown["labels"]) == (None, {"project": "report"})

    assert atoll("exec", session, "--", "cat", "notes.txt") == (0, "hello\n", "")

    assert atoll("archive", session) == (0, f"{session} archived\n", "")
    assert atoll("start", session) == (0, f"{session} running\n", "")
    assert atoll("cat", f"{session}:notes.txt") == (0, "hello\n", "")
    lines = dict(
        line.split(None, 1)
        for line in atoll("show", session)[1].splitlines()
        if " " in line.strip()
    )
    assert lines["next"].startswith("stops (idle) at ")


@pytest.mark.slow
def test_a_session_is_updated_and_cloned(atoll: Atoll, session: str) -> None:
    assert atoll("update", session, "--env", "A=1", "--no-label", "project", "--no-auto-start") == (
        0, f"{session}\n", "",
    )  # fmt: skip
    code, out, _ = atoll("extend", session, "7200")
    assert (code, out[:3]) == (0, atoll.json("show", session)["expires_at"][:3])
    copy = atoll("clone", session, "--label", "copy=1", "--auto-start")[1].strip()
    shown = atoll.json("show", copy)
    assert (shown["env_vars"], shown["labels"]) == ({"A": "1"}, {"copy": "1"})
    assert (shown["started_from"], shown["auto_start"]) == (session, True)
    assert [one["status"] for one in atoll.json("stop", copy, session)] == ["stopped"] * 2

    code, _, err = atoll("exec", session, "--", "ls")
    assert (code, "(session_not_running)" in err) == (1, True)
    code, _, err = atoll("update", session, "--disk", "64Mi")
    assert (code, "(disk_fixed)" in err) == (1, True)
    code, _, err = atoll("extend", session, "1000000000")
    assert (code, "(invalid_request)" in err) == (1, True)
    assert atoll("rm", copy)[0] == 0
    code, _, err = atoll("start", copy)
    assert (code, "(session_ended)" in err) == (1, True)
