"""Lifecycle of sessions through the SDK, against a real server and an embedded one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from atoll import Atoll, Conflict, NotFound
from tests.e2e.api import eventually, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from atoll import Session
    from tests.harness import Server

pytestmark = pytest.mark.quick


@pytest.fixture(params=["server", "embedded"])
def atoll(request: pytest.FixtureRequest, bubblewrap: str, tmp_path: Path) -> Iterator[Atoll]:
    if request.param == "embedded":
        with Atoll(data_dir=tmp_path, pool={"size": 0}) as atoll:
            yield atoll
    else:
        server: Server = request.getfixturevalue("server")
        with Atoll(server.url, api_key=server.key) as atoll:
            yield atoll


@pytest.fixture
def session(atoll: Atoll) -> Iterator[Session]:
    session = atoll.sessions.create(timeout=600)
    session.files.write("notes.txt", "hello")
    yield session
    session.delete()


def read(session: Session) -> str:
    return session.run("print(open('notes.txt').read(), end='')").check().stdout


def can_pause(session: Session) -> bool:
    try:
        return session.pause().status == "paused"
    except Conflict as error:
        if error.code != "pause_unavailable":
            raise
        return False


def test_running_code_starts_a_stopped_session(session: Session) -> None:
    before = session.refresh()
    stopped = session.stop()
    assert (stopped.status, stopped.wanted, stopped.observed) == ("stopped", "stopped", "stopped")
    assert (stopped.cause, stopped.container_id, stopped.expires_at) == ("user", None, None)
    assert stopped.rested_at is not None
    assert session.stop() == stopped

    assert read(session) == "hello"

    running = session.refresh()
    assert (running.status, running.wanted, running.cause) == ("running", "running", None)
    assert running.rested_at is None
    assert running.expires_at is not None
    assert before.expires_at is not None
    assert running.expires_at > before.expires_at


def test_an_archived_session_starts_with_its_files(session: Session) -> None:
    session.run("import os; os.mkdir('d'); os.symlink('../notes.txt', 'd/link')").check()

    archived = session.archive()
    assert (archived.status, archived.wanted) == ("archived", "archived")
    assert session.stop().status == "archived"

    started = session.start()
    assert started.status == "running"
    assert session.files.read_text("d/link") == "hello"


def test_stopping_a_session_cancels_its_executions(session: Session) -> None:
    execution = session.submit("open('began', 'w')\n" + until("never"))
    waiting = session.submit("open('second', 'w')")
    eventually(lambda: session.files.exists("began"))

    session.stop()

    for one in (execution, waiting):
        result = one.wait()
        assert (result.status, result.cause) == ("error", "user")
        assert one.info().status == "cancelled"
    assert session.refresh().status == "stopped"
    assert not session.files.exists("second")


def test_a_paused_session_keeps_its_memory_and_resumes_on_demand(session: Session) -> None:
    with session.context() as context:
        context.run("x = 41").check()
        if not can_pause(session):
            pytest.skip("instances of this node cannot be paused")
        assert session.info.expires_at is not None

        assert context.run("print(x + 1, end='')").check().stdout == "42"

        assert session.refresh().status == "running"
        session.pause()
        assert [one.id for one in session.contexts()] == [context.id]
        session.pause()
        assert session.resume().status == "running"
        session.stop()
        with pytest.raises(NotFound):
            context.run("x")


def test_a_busy_session_cannot_be_paused(session: Session) -> None:
    if not can_pause(session):
        pytest.skip("instances of this node cannot be paused")
    execution = session.submit("open('began', 'w')\n" + until("go"))
    eventually(lambda: session.files.exists("began"))

    with pytest.raises(Conflict) as refused:
        session.pause()

    assert refused.value.code == "session_busy"
    session.files.write("go", "")
    assert execution.wait().ok


def test_auto_start_can_be_disabled(session: Session) -> None:
    session.update(auto_start=False)
    session.stop()

    for path in ("notes.txt", "none"):
        with pytest.raises(Conflict) as refused:
            session.files.read_text(path)
        assert refused.value.code == "session_not_running"
    with pytest.raises(Conflict) as refused:
        read(session)
    assert refused.value.code == "session_not_running"

    assert session.refresh().status == "stopped"
    session.start()
    assert read(session) == "hello"


def test_a_change_applies_to_later_executions(session: Session) -> None:
    code = "import os; print(os.environ.get('A'), os.environ.get('B'), end='')"
    session.update(env={"A": "1", "B": "2"}, labels={"a": "b", "c": "d"})
    assert session.run(code).stdout == "1 2"

    changed = session.update(env={"B": None}, labels={"a": None}, idle_timeout=500, memory="256Mi")

    assert (changed.env_vars, changed.labels) == ({"A": "1"}, {"c": "d"})
    assert (changed.idle_timeout, changed.resources.memory) == (500, "256Mi")
    assert session.run(code).stdout == "1 None"
    assert session.update(idle_timeout=0).idle_timeout is None
    before = session.info.expires_at
    assert before is not None
    after = session.extend(3600).expires_at
    assert after is not None
    assert after > before


def test_a_workspace_is_resized_while_it_is_archived(session: Session) -> None:
    with pytest.raises(Conflict) as refused:
        session.update(disk="64Mi")
    assert refused.value.code == "disk_fixed"

    session.archive()
    session.update(disk="64Mi")

    assert read(session) == "hello"
    assert session.refresh().resources.disk == "64Mi"


@pytest.mark.parametrize("state", ["running", "stopped", "archived"])
def test_a_clone_has_the_files_and_is_independent(session: Session, state: str) -> None:
    session.update(env={"A": "1"}, labels={"of": "mine"})
    if state != "running":
        getattr(session, {"stopped": "stop", "archived": "archive"}[state])()

    copy = session.clone(labels={"of": None, "copy": "1"}, timeout=77)

    try:
        assert copy.id != session.id
        assert (copy.info.status, copy.info.timeout) == ("running", 77)
        assert (copy.info.env_vars, copy.info.labels) == ({"A": "1"}, {"copy": "1"})
        assert session.refresh().status == state
        copy.files.write("notes.txt", "other")
        assert (read(copy), read(session)) == ("other", "hello")
    finally:
        copy.delete()


@pytest.mark.parametrize("disk", [None, "64Mi"], ids=["same", "other-size"])
def test_a_session_without_files_is_cloned_too(atoll: Atoll, disk: str | None) -> None:
    with atoll.session() as session:
        session.archive()
        copy = session.clone(disk=disk)
        assert list(copy.files.list()) == []
        copy.delete()


@pytest.mark.slow
def test_timers_stop_archive_and_end_a_session(atoll: Atoll) -> None:
    session = atoll.sessions.create(idle_timeout=1, archive_after=1)
    brief = atoll.sessions.create(idle_timeout=1, delete_after=1)
    # Nothing is idle in which something runs.
    assert session.run("import time; time.sleep(2.5)").ok

    eventually(lambda: session.refresh().status == "archived")
    assert session.info.cause == "idle"
    session.update(delete_after=1)
    eventually(lambda: session.refresh().ended_at is not None)
    eventually(lambda: brief.refresh().ended_at is not None)
    for one in (session, brief):
        assert (one.info.status, one.info.cause) == ("terminated", "idle")


def test_an_ended_session_cannot_change_state(atoll: Atoll) -> None:
    with atoll.session() as session:
        session.stop()
    # Where nothing can be paused, that is the answer to `pause`.
    verbs = ("start", "stop", "archive", "resume")
    for verb in (*verbs, "pause") if os.geteuid() == 0 else verbs:
        with pytest.raises(Conflict) as refused:
            getattr(session, verb)()
        assert refused.value.code == "session_ended"
    with pytest.raises(Conflict):
        session.extend(60)
