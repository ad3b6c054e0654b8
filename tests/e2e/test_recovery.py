"""Sessions and executions after the server, or an instance, died."""

from __future__ import annotations

import glob
import os
import signal
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from atoll.service.executions import attempt
from tests import drivers
from tests.e2e.api import V1, Api, eventually, problem, until
from tests.harness import Server
from tests.standstill import go_on, stand_still

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def own(bubblewrap: str, tmp_path: Path) -> Iterator[Server]:
    """A server for one test to kill."""
    pool = {"ATOLL_POOL__SIZE": "1", "ATOLL_POOL__MAX_SIZE": "1"}
    with Server(tmp_path, ATOLL_SHUTDOWN_TIMEOUT="1", **pool) as server:
        yield server


@contextmanager
def calling(server: Server) -> Iterator[Api]:
    with server.client() as http:
        yield Api(http)


def handle(server: Server, instance_id: str) -> dict[str, Any]:
    return drivers.handle(server.data_dir, instance_id)


def runs(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def groups_of(instance_id: str) -> list[Path]:
    """Its control groups, in whichever hierarchy and version."""
    # Groups of other servers change concurrently, which would make `Path.glob` raise.
    return [Path(found) for depth in ("*", "*/*", "*/*/*", "*/*/*/*")
            for found in glob.glob(f"/sys/fs/cgroup/{depth}/{instance_id}")]  # fmt: skip


def crash(server: Server) -> None:
    """The end that no server can prepare for, and a new start."""
    server.stop(signal.SIGKILL)
    server.start()


# The server is killed


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.every_driver
def test_a_session_survives_the_server(own: Server) -> None:
    with calling(own) as api:
        before = api.create()
        api.put(before["id"], "kept", b"here")
    crash(own)

    with calling(own) as api:
        assert api.get(before["id"]) == before
        assert api.run(before["id"], "print(open('kept').read())")["stdout"] == "here\n"
        assert api.get(before["id"])["container_id"] == before["container_id"]


@pytest.mark.quick
def test_a_running_execution_continues_while_the_server_restarts(own: Server) -> None:
    code = (
        "for n in range(1000): print(n)\n"
        + until("go")
        + "for n in range(1000, 2000): print(n)\n"
        + "open('made', 'w').close()\n"
    )
    with calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, code)
        next(name for _, name, _ in api.events(execution_id) if name == "stdout")
    died = datetime.now(UTC)
    crash(own)

    with calling(own) as api:
        eventually(lambda: api.status(execution_id) == "running")
        api.put(session, "go")
        result = api.result(execution_id)
        assert result["status"] == "success"
        (attempt,) = api.execution(execution_id)["attempts"]
        # Not when it was found again.
        assert datetime.fromisoformat(attempt["started_at"]) < died
        assert result["stdout"] == "".join(f"{n}\n" for n in range(2000))
        assert result["artifacts"] == ["made"]


def test_a_return_value_is_not_lost_with_the_server(own: Server) -> None:
    code = until("go") + "def handler(event):\n    return {'seen': event}"
    with calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, code, event=[1, 2])
        api.await_status(execution_id, "running")
    crash(own)

    with calling(own) as api:
        api.put(session, "go")
        assert api.result(execution_id)["return_value"] == {"seen": [1, 2]}


def test_a_result_produced_while_no_server_ran_is_stored(own: Server) -> None:
    code = "import time\nprint('begun')\n" + until("go") + "time.sleep(0.2)\nprint('ended')"
    with calling(own) as api:
        session = api.create()
        execution_id = api.submit(session["id"], code)
        next(name for _, name, _ in api.events(execution_id) if name == "stdout")
        init = handle(own, session["container_id"])["child"]
        (leader,) = sandboxed_code(init)
        api.put(session["id"], "go")
    own.stop(signal.SIGKILL)
    eventually(lambda: not runs(leader))
    own.start()

    with calling(own) as api:
        result = api.result(execution_id)
        assert (result["status"], result["stdout"]) == ("success", "begun\nended\n")


def journal_of(server: Server, instance_id: str) -> Path:
    return drivers.journal(server.data_dir, instance_id)


@pytest.mark.slow
def test_an_execution_that_ended_while_the_server_was_suspended_has_its_result(own: Server) -> None:
    """Long beyond its time-out, at which a run that had not ended would have been ended."""
    with calling(own) as api:
        session = api.create()["id"]
        assert own.process is not None
        code = "import time\nopen('begun', 'w')\ntime.sleep(1)\nprint('done')"
        execution = api.submit(session, code, timeout=2)
        eventually(lambda: "begun" in api.names(session))
        stand_still(own.process.pid)
        # Until the deadlines of this server have passed, which has no event.
        time.sleep(attempt.OVERDUE + 3)
        go_on(own.process.pid)
        result = api.result(execution)
        assert (result["status"], result["stdout"]) == ("success", "done\n")
        assert api.run(session, "print(open('begun').name)")["stdout"] == "begun\n"


@pytest.mark.parametrize("fate", ["killed", "garbage"])
def test_an_execution_that_ended_before_server_and_instance_died_is_reported_and_runs_once(
    own: Server, fate: str
) -> None:
    code = (
        "import sys\nopen('token', 'a').write('x')\nprint('begun')\n"
        + until("go")
        + "print('ended', file=sys.stderr)\ndef handler(event): return {'seen': event}"
    )
    with calling(own) as api:
        session = api.create()
        execution_id = api.submit(session["id"], code, event=[1])
        next(name for _, name, _ in api.events(execution_id) if name == "stdout")
        init = handle(own, session["container_id"])["child"]
        journal = journal_of(own, session["container_id"])
        assert journal.stat().st_size == 0
        own.stop(signal.SIGKILL)
    (Path(f"/proc/{init}/root/workspace") / "go").touch()
    eventually(lambda: journal.stat().st_size > 0)
    os.kill(init, signal.SIGKILL)
    eventually(lambda: not runs(init))
    if fate == "garbage":
        journal.write_bytes(os.urandom(100_000))
    own.start()

    with calling(own) as api:
        result = api.result(execution_id)
        if fate == "killed":
            assert (result["status"], result["stdout"]) == ("success", "begun\n")
            assert (result["stderr"], result["return_value"]) == ("ended\n", {"seen": [1]})
            assert api.run(session["id"], "print(open('token').read())")["stdout"] == "x\n"
        else:
            # Its end cannot be known, but the session continues.
            assert api.run(session["id"], "print(6 * 7)")["stdout"] == "42\n"
        assert api.get(session["id"])["container_id"] != session["container_id"]


def test_a_journal_is_removed_with_its_workspace(own: Server) -> None:
    with calling(own) as api:
        session = api.create()
        journal = journal_of(own, session["container_id"])
        api.run(session["id"], "print(1)")
        # By now the result is acknowledged; the record may stay until the file is emptied.
        assert journal.exists()
        assert journal.stat().st_mode & 0o777 == 0o600
        api.end(session["id"])
        eventually(lambda: not journal.parent.exists())


def sandboxed_code(init: int) -> list[int]:
    """The descendants of the zygote of an instance that have a job."""
    waiting = [pid for zygote in children(init) for pid in children(zygote)]
    # A child that waits for a job has no pipe as its output.
    return [pid for pid in waiting if os.readlink(f"/proc/{pid}/fd/1").startswith("pipe:")]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_after_a_restart_queued_executions_run_in_order_after_the_running_one(own: Server) -> None:
    with calling(own) as api:
        session = api.create()["id"]
        running = api.submit(session, until("go") + "open('log', 'a').write('0')")
        mark = "open('log', 'a').write('<')\nopen('log', 'a').write('{}>')"
        waiting = [api.submit(session, mark.format(number)) for number in range(1, 7)]
        api.await_status(running, "running")
    crash(own)

    with calling(own) as api:
        api.await_status(running, "running")
        assert {api.status(execution_id) for execution_id in waiting} == {"pending"}
        api.put(session, "go")
        for execution_id in [running, *waiting]:
            assert api.result(execution_id)["status"] == "success"
        wanted = "0" + "".join(f"<{number}>" for number in range(1, 7))
        assert api.run(session, "print(open('log').read())")["stdout"].strip() == wanted


def events_after(api: Api, execution_id: str, after: str) -> list[tuple[str, str | None]]:
    """Name and text of each event after that one."""
    return [(name, data.get("text")) for _, name, data in api.events(execution_id, after)]


@pytest.mark.every_driver
def test_a_client_resumes_a_stream_on_a_new_server_and_misses_nothing(own: Server) -> None:
    code = "print('one')\n" + until("go") + "print('two')"
    with calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, code)
        last = next(number for number, name, _ in api.events(execution_id) if name == "stdout")
    crash(own)

    with calling(own) as api:
        api.put(session, "go")
        rest = events_after(api, execution_id, last)
        assert rest == [("stdout", "two\n"), ("result", None)]


def test_a_session_that_expired_while_no_server_ran_ends_at_the_start(own: Server) -> None:
    with calling(own) as api:
        shown = api.create(timeout=8)
        pid = handle(own, shown["container_id"])["child"]
    own.stop(signal.SIGKILL)
    assert runs(pid)
    eventually(lambda: datetime.now(UTC) > datetime.fromisoformat(shown["expires_at"]), 30)
    own.start()

    with calling(own) as api:
        eventually(lambda: api.get(shown["id"])["status"] == "timeout", 30)
        eventually(lambda: not runs(pid))


def test_a_dead_server_leaves_no_instances_of_its_pool(own: Server) -> None:
    with calling(own) as api:
        eventually(lambda: api.pool().get("python") == 1)
    crash(own)

    with calling(own) as api:
        eventually(lambda: api.pool().get("python") == 1)
        eventually(lambda: len(drivers.instances(own.data_dir)) == 1)


def test_instances_without_an_owner_are_removed_at_the_start(own: Server) -> None:
    with calling(own) as api:
        shown = api.create()
        pid = handle(own, shown["container_id"])["child"]
    own.stop(signal.SIGKILL)
    for file in own.data_dir.glob("atoll.db*"):
        file.unlink()
    own.start()

    with calling(own) as api:
        problem(api.http.get(f"{V1}/sessions/{shown['id']}"), 404, "session_not_found")
    assert not runs(pid)
    assert groups_of(shown["container_id"]) == []


# The server ends


def test_sessions_outlive_a_graceful_shutdown(own: Server) -> None:
    with calling(own) as api:
        before = api.create()
        execution_id = api.submit(before["id"], "print(1)\n" + until("go") + "print(2)")
        next(name for _, name, _ in api.events(execution_id) if name == "stdout")
    assert own.stop(signal.SIGTERM) == 0
    assert runs(handle(own, before["container_id"])["child"])
    own.start()

    with calling(own) as api:
        assert api.get(before["id"])["container_id"] == before["container_id"]
        api.put(before["id"], "go")
        assert api.result(execution_id)["stdout"] == "1\n2\n"


def test_a_shutdown_does_not_wait_for_running_executions(bubblewrap: str, tmp_path: Path) -> None:
    with Server(tmp_path, ATOLL_POOL__SIZE="0", ATOLL_SHUTDOWN_TIMEOUT="60") as server:
        with calling(server) as api:
            session = api.create()["id"]
            running = api.submit(session, until("go") + "print(1)")
            waiting = api.submit(session, "print(2)")
            api.await_status(running, "running")
        started = time.monotonic()
        assert server.stop(signal.SIGTERM) == 0
        assert time.monotonic() - started < 20
        server.start()
        with calling(server) as api:
            api.put(session, "go")
            assert api.result(running)["stdout"] == "1\n"
            assert api.result(waiting)["stdout"] == "2\n"


def test_waiting_requests_get_503_at_shutdown(own: Server) -> None:
    with calling(own) as api, ThreadPoolExecutor(2) as threads:
        session = api.create()["id"]
        execution_id = api.submit(session, "print(1, flush=True)\n" + until("go") + "print(2)")
        events = api.events(execution_id)
        received = next(number for number, name, _ in events if name == "stdout")
        sent = threading.Event()

        def trace(name: str, _: object) -> None:
            if name == "http11.send_request_body.complete":
                sent.set()

        waiting = threads.submit(
            api.http.get, f"{V1}/executions/{execution_id}/result", params={"wait": 40},
            extensions={"trace": trace},
        )  # fmt: skip
        assert sent.wait(30)
        # When this is answered, that has come in.
        assert api.status(execution_id) == "running"
        assert own.stop() == 0

        problem(waiting.result(), 503, "shutting_down")
        assert list(events) == []
        assert "Traceback" not in own.stderr()
    own.start()
    with calling(own) as api:
        api.put(session, "go")
        rest = events_after(api, execution_id, received)
        assert rest == [("stdout", "2\n"), ("result", None)]


@pytest.mark.every_driver
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_server_with_stop_sessions_leaves_nothing(
    bubblewrap: str, tmp_path: Path, number: signal.Signals
) -> None:
    env = {"ATOLL_SHUTDOWN_TIMEOUT": "5", "ATOLL_POOL__MAX_SIZE": "2"}
    with Server(tmp_path, "--stop-sessions", **env) as server:
        with calling(server) as api:
            eventually(lambda: api.pool().get("python") == 2)
            shown = [api.create() for _ in range(3)]
            eventually(lambda: api.pool().get("python") == 2)
            running = api.submit(shown[0]["id"], until("never"))
            api.run(shown[1]["id"], "import subprocess\nsubprocess.Popen(['sleep', '1000'])")
            api.await_status(running, "running")
            instances = drivers.instances(tmp_path)
            pids = []
            for name in instances:
                # An instance that is being created for the pool has no handle yet.
                with suppress(FileNotFoundError):
                    pids += [handle(server, name)[key] for key in ("pid", "child")]
        assert len(pids) >= 2 * 3
        assert all(runs(pid) for pid in pids)
        assert server.stop(number) == 0

        assert not any(runs(pid) for pid in pids)
        assert [group for name in instances for group in groups_of(name)] == []
        assert drivers.instances(tmp_path) == drivers.workspaces(tmp_path) == set()
    with Server(tmp_path) as again, calling(again) as api:
        for session in shown:
            ended = api.get(session["id"])
            assert (ended["status"], ended["cause"]) == ("terminated", "shutdown")
        assert api.status(running) == "cancelled"


def test_two_servers_on_one_machine_are_independent(own: Server, tmp_path: Path) -> None:
    with calling(own) as api:
        shown = api.create()
        eventually(lambda: api.pool().get("python") == 1)
        there = drivers.instances(own.data_dir)
        other = tmp_path / "other"
        other.mkdir()
        with Server(other, "--stop-sessions", ATOLL_POOL__SIZE="1") as second:
            with calling(second) as second_api:
                assert second_api.run(second_api.create()["id"], "print(1)")["stdout"] == "1\n"
            assert api.run(shown["id"], "print(2)")["stdout"] == "2\n"
        assert api.get(shown["id"])["container_id"] == shown["container_id"]
        assert there <= drivers.instances(own.data_dir)
        assert all(runs(handle(own, name)["child"]) for name in there)


# An instance dies


@pytest.mark.parametrize("which", [["child"], ["pid", "child"]], ids=["PID 1", "all of it"])
def test_a_killed_instance_is_replaced_within_one_request(
    api: Api, server: Server, session: str, which: list[str]
) -> None:
    api.put(session, "kept", b"here")
    before = api.get(session)["container_id"]
    pids = handle(server, before)
    for name in which:
        os.kill(pids[name], signal.SIGKILL)
    eventually(lambda: not runs(pids["child"]))

    assert api.run(session, "print(open('kept').read())")["stdout"] == "here\n"
    after = api.get(session)
    assert after["container_id"] != before
    assert after["status"] == "running"
    eventually(lambda: before not in drivers.instances(server.data_dir))


def test_an_instance_survives_the_process_that_started_it(
    api: Api, server: Server, session: str
) -> None:
    os.kill(handle(server, api.get(session)["container_id"])["pid"], signal.SIGKILL)

    assert api.run(session, "print(1)")["stdout"] == "1\n"


def test_a_request_for_files_replaces_a_killed_instance_too(
    api: Api, server: Server, session: str
) -> None:
    api.put(session, "kept", b"here")
    pid = handle(server, api.get(session)["container_id"])["child"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not runs(pid))

    assert api.http.get(f"{V1}/sessions/{session}/files/kept").content == b"here"


ONCE_MORE = """
import os, time
with open("attempts", "a") as file: file.write("x")
print("attempt", flush=True)
while len(open("attempts").read()) < {enough}: time.sleep(0.01)
print("done")
"""
"""Waits for ever, unless it was begun often enough."""


def kill_instance(server: Server, api: Api, session_id: str) -> None:
    """As a machine in trouble would: from outside, without a word."""
    os.kill(handle(server, api.get(session_id)["container_id"])["child"], signal.SIGKILL)


def test_executions_in_a_killed_instance_are_retried(
    api: Api, server: Server, session: str
) -> None:
    first = api.get(session)["container_id"]
    execution_id = api.submit(session, ONCE_MORE.format(enough=2))
    waiting = api.submit(session, "print('after')")
    events = api.events(execution_id)
    next(name for _, name, _ in events if name == "stdout")
    kill_instance(server, api, session)

    rest = [(name, data) for _, name, data in events]
    names = [name for name, _ in rest]
    assert (names[:2], names[-1]) == (["retry", "started"], "result")
    assert set(names[2:-1]) == {"stdout"}
    retried = rest[0][1]
    assert (retried["attempt"], retried["cause"], retried["delay"]) == (2, "instance_lost", 1.0)
    shown = api.execution(execution_id)
    # What the lost attempt printed is not the result's.
    assert (shown["status"], shown["stdout"]) == ("completed", "attempt\ndone\n")
    assert shown["retry_count"] == 1
    lost, last = shown["attempts"]
    assert (lost["cause"], lost["container_id"]) == ("instance_lost", first)
    assert (last["cause"], last["container_id"]) == (None, api.get(session)["container_id"])
    assert lost["started_at"] < lost["ended_at"] < last["started_at"] < last["ended_at"]
    assert api.result(waiting)["stdout"] == "after\n"


def test_an_execution_that_loses_every_instance_fails(bubblewrap: str, tmp_path: Path) -> None:
    with Server(tmp_path, ATOLL_EXECUTION__RETRY_BACKOFF="0.05") as own, calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, ONCE_MORE.format(enough=100))
        events = api.events(execution_id)
        for _ in range(4):
            next(name for _, name, _ in events if name == "stdout")
            kill_instance(own, api, session)

        result = api.result(execution_id)
        assert (result["status"], result["cause"]) == ("error", "instance_lost")
        shown = api.execution(execution_id)
        assert (shown["status"], shown["retry_count"]) == ("crashed", 3)
        assert [attempt["cause"] for attempt in shown["attempts"]] == ["instance_lost"] * 4
        # The session continues.
        assert api.run(session, "print(open('attempts').read())")["stdout"] == "xxxx\n"


def test_a_waiting_retry_can_be_cancelled(bubblewrap: str, tmp_path: Path) -> None:
    slow = {"ATOLL_EXECUTION__RETRY_BACKOFF": "600", "ATOLL_EXECUTION__RETRY_MAX_BACKOFF": "600"}
    with Server(tmp_path, **slow) as own, calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, ONCE_MORE.format(enough=2))
        events = api.events(execution_id)
        next(name for _, name, _ in events if name == "stdout")
        kill_instance(own, api, session)
        next(name for _, name, _ in events if name == "retry")
        response = api.http.post(
            f"{V1}/executions/{execution_id}/cancel", json={"reason": "enough"}
        )
        assert response.json()["status"] == "cancelled"
        assert api.result(execution_id)["error"]["message"].endswith(": enough")


def test_an_instance_that_dies_with_the_server_is_replaced(own: Server) -> None:
    with calling(own) as api:
        shown = api.create()
        api.put(shown["id"], "kept", b"here")
        execution_id = api.submit(shown["id"], ONCE_MORE.format(enough=2))
        next(name for _, name, _ in api.events(execution_id) if name == "stdout")
        pid = handle(own, shown["container_id"])["child"]
    own.stop(signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not runs(pid))
    own.start()

    with calling(own) as api:
        assert api.result(execution_id)["stdout"] == "attempt\ndone\n"
        assert api.execution(execution_id)["retry_count"] == 1
        assert api.run(shown["id"], "print(open('kept').read())")["stdout"] == "here\n"


def test_executions_submitted_while_an_executor_exits_run_in_the_next_instance(
    api: Api, server: Server
) -> None:
    session = api.create(capacity=3)["id"]
    long = api.submit(session, ONCE_MORE.format(enough=2))
    next(name for _, name, _ in api.events(long) if name == "stdout")
    stream = [(session, "print(1)")] * 300
    with ThreadPoolExecutor(4) as threads:
        coming = [threads.submit(api.run, *one) for one in stream]
        coming[50].result()
        os.kill(handle(server, api.get(session)["container_id"])["child"], signal.SIGTERM)
        results = [one.result() for one in coming]
    assert {(result["status"], result["cause"]) for result in results} == {("success", None)}
    assert api.result(long)["stdout"] == "attempt\ndone\n"
    api.end(session)


def test_a_retry_lost_with_the_server_counts_too(own: Server) -> None:
    with calling(own) as api:
        session = api.create()["id"]
        execution_id = api.submit(session, ONCE_MORE.format(enough=3))
        events = api.events(execution_id)
        next(name for _, name, _ in events if name == "stdout")
        kill_instance(own, api, session)
        next(name for _, name, _ in events if name == "retry")
        next(name for _, name, _ in events if name == "stdout")
        pid = handle(own, api.get(session)["container_id"])["child"]
    own.stop(signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not runs(pid))
    own.start()

    with calling(own) as api:
        assert api.result(execution_id)["stdout"] == "attempt\ndone\n"
        shown = api.execution(execution_id)
        assert shown["retry_count"] == 2
        causes = [attempt["cause"] for attempt in shown["attempts"]]
        assert causes == ["instance_lost", "instance_lost", None]


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM instances WHERE id = :instance",
        "UPDATE sessions SET instance_id = NULL WHERE id = :session",
    ],
    ids=["made and not recorded", "recorded and not handed over"],
)
def test_an_unfinished_instance_does_not_delete_the_files_of_its_session(
    own: Server, change: str
) -> None:
    with calling(own) as api:
        shown = api.create()
        api.run(shown["id"], "open('kept', 'w').write('here')")
    own.stop(signal.SIGKILL)
    # As if it had died while a new instance for this session was coming up.
    with closing(sqlite3.connect(own.data_dir / "atoll.db")) as database:
        values = {"instance": shown["container_id"], "session": shown["id"]}
        assert database.execute(change, values).rowcount == 1
        database.commit()
    own.start()

    with calling(own) as api:
        others = [api.create()["id"] for _ in range(3)]
        for other in others:
            assert api.run(other, "import os\nprint(os.listdir())")["stdout"] == "['.tmp']\n"
        assert api.run(shown["id"], "print(open('kept').read())")["stdout"] == "here\n"
