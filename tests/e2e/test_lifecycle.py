"""Sessions are started, stopped, archived, paused, changed and cloned, by requests and by time."""

from __future__ import annotations

import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests import drivers, unprivileged
from tests.drivers import PAUSE, pausing
from tests.e2e.api import V1, Api, answer, eventually, problem, sh, until
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

pytestmark = pytest.mark.quick

MiB = 2**20
VERBS = ("start", "stop", "archive", PAUSE, "resume", "clone")


@pytest.fixture(scope="module")
def own(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without a pool: each instance is started by a request."""
    directory = tmp_path_factory.mktemp("lifecycle")
    given = {"ATOLL_POOL__SIZE": "0", "ATOLL_SESSION__TIMER_SWEEP": "0.5"}
    with Server(directory, **given) as server:
        yield server


@pytest.fixture(scope="module")
def api(own: Server) -> Iterator[Api]:
    with own.client() as http:
        yield Api(http)


def post(api: Api, session_id: str, verb: str, **options: Any) -> httpx.Response:
    return api.http.post(f"{V1}/sessions/{session_id}/{verb}", **options)


def do(api: Api, session_id: str, verb: str, **query: Any) -> dict[str, Any]:
    """What the session is when it was asked to be that, and waited for."""
    return answer(post(api, session_id, verb, params=query))


def patch(api: Api, session_id: str, **fields: Any) -> httpx.Response:
    return api.http.patch(f"{V1}/sessions/{session_id}", json=fields)


def await_state(api: Api, session_id: str, status: str, seconds: float = 15.0) -> dict[str, Any]:
    eventually(lambda: api.get(session_id)["status"] == status, seconds)
    return api.get(session_id)


def at(told: dict[str, Any], name: str) -> datetime:
    return datetime.fromisoformat(told[name])


@contextmanager
def made(server: Server) -> Iterator[set[str]]:
    """The names of all instances that are created during the block."""
    before, names, over = drivers.instances(server.data_dir), set[str](), threading.Event()

    def look() -> None:
        while not over.wait(0.0005):
            names.update(drivers.instances(server.data_dir) - before)

    watching = threading.Thread(target=look)
    watching.start()
    try:
        yield names
    finally:
        over.set()
        watching.join()
        names.update(drivers.instances(server.data_dir) - before)


# Stop and start


@pytest.mark.slow
@pytest.mark.every_driver
def test_a_stopped_session_has_its_files_and_no_instance(api: Api, session: str) -> None:
    api.put(session, "kept", b"here")
    before = api.get(session)
    shown = do(api, session, "stop")

    assert (shown["status"], shown["wanted"], shown["observed"]) == ("stopped",) * 3
    assert (shown["cause"], shown["container_id"], shown["expires_at"]) == ("user", None, None)
    assert at(shown, "rested_at") >= at(before, "created_at")
    assert api.get(session) == shown

    started = do(api, session, "start")
    assert (started["status"], started["wanted"]) == ("running", "running")
    assert (started["cause"], started["rested_at"]) == (None, None)
    assert started["container_id"] not in (None, before["container_id"])
    life = at(started, "expires_at") - at(started, "updated_at")
    assert timedelta(0) < life <= timedelta(seconds=started["timeout"] + 1)
    assert sh(api, session, "cat kept") == "here"


@pytest.mark.parametrize("rest", ["stop", "archive"])
def test_a_request_starts_a_stopped_session(api: Api, session: str, rest: str) -> None:
    api.put(session, "kept", b"here")
    do(api, session, rest)

    found = api.http.get(f"{V1}/sessions/{session}/files/kept")
    assert (found.status_code, found.content) == (200, b"here")
    assert api.run(session, "print(open('kept').read())")["stdout"] == "here\n"
    assert api.get(session)["status"] == "running"


def test_stopping_a_stopped_session_changes_nothing(api: Api, session: str) -> None:
    first = do(api, session, "stop")

    assert do(api, session, "stop") == first
    assert do(api, session, "archive")["status"] == "archived"
    # There is less of it already.
    again = do(api, session, "stop")
    assert (again["status"], again["wanted"]) == ("archived", "archived")


def test_starting_a_running_session_changes_nothing(api: Api, session: str) -> None:
    before = api.get(session)
    shown = do(api, session, "start")

    assert shown["container_id"] == before["container_id"]
    assert (shown["status"], shown["expires_at"]) == ("running", before["expires_at"])


def test_with_wait_0_the_response_has_the_wanted_state(api: Api, session: str) -> None:
    shown = do(api, session, "stop", wait=0)

    assert shown["wanted"] == "stopped"
    assert await_state(api, session, "stopped")["cause"] == "user"


def test_an_archived_session_uses_no_disk_on_the_node(api: Api, own: Server, session: str) -> None:
    sh(api, session, "mkdir -p a/b; echo one > a/b/c; ln -s a link; chmod 700 a/b/c")
    there = drivers.workspaces(own.data_dir)
    shown = do(api, session, "archive")

    assert (shown["status"], shown["wanted"], shown["cause"]) == ("archived", "archived", "user")
    eventually(lambda: len(drivers.workspaces(own.data_dir) & there) < len(there))
    started = do(api, session, "start")
    assert started["status"] == "running"
    assert sh(api, session, "cat a/b/c; readlink link; stat -c %a a/b/c") == "one\na\n700\n"


def test_a_session_can_be_stopped_and_started_repeatedly(api: Api, session: str) -> None:
    for number, verb in enumerate(("stop", "archive", "stop", "archive")):
        sh(api, session, f"echo {number} >> log")
        do(api, session, verb)
    assert sh(api, session, "cat log") == "0\n1\n2\n3\n"


@pytest.mark.slow
@pytest.mark.every_driver
def test_an_empty_session_can_be_archived(api: Api, session: str) -> None:
    assert do(api, session, "archive")["status"] == "archived"
    assert api.run(session, "print(1)")["stdout"] == "1\n"


# auto_start


@pytest.mark.parametrize("rest", ["stop", "archive", PAUSE])
def test_without_auto_start_only_a_start_request_starts_a_session(api: Api, rest: str) -> None:
    session = api.create(auto_start=False)["id"]
    api.put(session, "kept", b"here")
    status = do(api, session, rest)["status"]

    error = problem(api.execute(session, code="print(1)"), 409, "session_not_running")
    assert error["status_now"] == status
    for path in ("files/kept", "contexts", "processes"):
        found = api.http.get(f"{V1}/sessions/{session}/{path}")
        # Listing contexts needs no instance.
        if path != "contexts" or found.status_code != 200:
            problem(found, 409, "session_not_running")
    assert api.get(session)["status"] == status
    assert do(api, session, "start")["status"] == "running"
    assert sh(api, session, "cat kept") == "here"
    answer(patch(api, session, auto_start=True))
    do(api, session, rest)
    assert api.run(session, "print(1)")["stdout"] == "1\n"
    api.end(session)


# Pause


@pytest.mark.every_driver
@pausing
def test_a_paused_session_keeps_its_memory_and_resumes_on_a_request(api: Api, session: str) -> None:
    context = answer(api.http.post(f"{V1}/sessions/{session}/contexts", json={}), 201)["id"]
    api.run(session, "x = 41", context_id=context)
    before = api.get(session)["container_id"]
    shown = do(api, session, "pause")

    assert (shown["status"], shown["wanted"]) == ("paused", "paused")
    assert (shown["container_id"], shown["rested_at"]) == (before, None)
    assert shown["expires_at"] is not None
    assert do(api, session, "pause") == shown
    result = api.run(session, "x + 1", context_id=context)
    assert result["status"] == "success"
    assert api.get(session)["container_id"] == before
    do(api, session, "pause")
    assert do(api, session, "resume")["status"] == "running"
    assert api.run(session, "print(x)", context_id=context)["stdout"] == "41\n"


@pausing
def test_a_paused_session_uses_no_cpu_time(api: Api, session: str) -> None:
    sh(api, session, "nohup sh -c 'while :; do date +%N > n; done' >/dev/null 2>&1 &")
    eventually(lambda: "n" in api.names(session))
    do(api, session, "pause")
    before = api.get(session)
    do(api, session, "resume")
    # It still runs, and continues where it was.
    first = sh(api, session, "cat n")
    eventually(lambda: sh(api, session, "cat n") != first)
    assert before["status"] == "paused"


@pausing
def test_a_paused_session_can_be_stopped_archived_and_cloned(api: Api, session: str) -> None:
    api.put(session, "kept", b"here")
    do(api, session, "pause")
    clone = answer(post(api, session, "clone"), 201)
    assert sh(api, clone["id"], "cat kept") == "here"
    assert api.get(session)["status"] == "paused"
    assert do(api, session, "stop")["status"] == "stopped"
    do(api, session, "start")
    do(api, session, "pause")
    assert do(api, session, "archive")["status"] == "archived"
    assert sh(api, session, "cat kept") == "here"
    api.end(clone["id"])


def test_contexts_are_lost_after_a_stop(api: Api, session: str) -> None:
    context = answer(api.http.post(f"{V1}/sessions/{session}/contexts", json={}), 201)["id"]
    api.run(session, "x = 1", context_id=context)
    do(api, session, "stop")

    problem(api.execute(session, code="x", context_id=context, wait=10), 404, "context_not_found")
    assert answer(api.http.get(f"{V1}/sessions/{session}/contexts"))["items"] == []


@pytest.mark.every_driver
@pausing
def test_a_session_with_a_running_execution_is_not_paused(api: Api, session: str) -> None:
    execution = api.submit(session, until("go"), timeout=60)
    api.await_status(execution, "running")

    problem(post(api, session, "pause"), 409, "session_busy")
    assert api.get(session)["status"] == "running"
    api.put(session, "go")
    assert api.result(execution)["status"] == "success"
    assert do(api, session, "pause")["status"] == "paused"


@pausing
@pytest.mark.parametrize("rest", ["stop", "archive"])
def test_a_stopped_session_is_not_paused(api: Api, session: str, rest: str) -> None:
    do(api, session, rest)

    problem(post(api, session, "pause"), 409, "session_not_running")


@pytest.mark.slow
def test_a_node_that_cannot_pause_reports_the_reason(bubblewrap: str) -> None:
    unprivileged.require()
    with unprivileged.directory() as directory:
        server = unprivileged.UnprivilegedServer(directory, **unprivileged.environment(directory))
        with server, server.client() as http:
            api = Api(http)
            session = api.create()["id"]
            api.put(session, "kept", b"here")
            problem(post(api, session, "pause"), 409, "pause_unavailable")
            # All else goes.
            assert do(api, session, "stop")["status"] == "stopped"
            assert do(api, session, "archive")["status"] == "archived"
            clone = answer(post(api, session, "clone"), 201)["id"]
            assert sh(api, clone, "cat kept") == "here"
            assert sh(api, session, "cat kept") == "here"
            copy = answer(post(api, session, "clone"), 201)["id"]
            assert sh(api, copy, "cat kept") == "here"
            api.end(session)


# Refusals


@pytest.mark.parametrize("verb", VERBS)
def test_an_unknown_session_is_not_found(api: Api, verb: str) -> None:
    problem(post(api, "sess_nope", verb), 404, "session_not_found")
    problem(patch(api, "sess_nope", timeout=1), 404, "session_not_found")


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "clone"])
def test_an_ended_session_cannot_change(api: Api, verb: str) -> None:
    session = api.create()["id"]
    ended = api.end(session)

    error = problem(post(api, session, verb), 409, "session_ended")
    assert error["status_now"] == "terminated"
    problem(patch(api, session, timeout=1), 409, "session_ended")
    eventually(lambda: api.get(session)["observed"] == "destroyed")
    assert api.get(session)["ended_at"] == ended["ended_at"]


@pytest.mark.parametrize(
    "fields",
    [
        {"timeout": 0},
        {"timeout": 10**9},
        {"timeout": "soon"},
        {"idle_timeout": -1},
        {"archive_after": 10**12},
        {"delete_after": 1.5},
        {"labels": {"": "x"}},
        {"labels": {"a": "x" * 10_000}},
        {"labels": {str(number): "x" for number in range(65)}},
        {"env_vars": {"A=B": "x"}},
        {"memory": "1"},
        {"memory": "1Pi"},
        {"cpu": "0"},
        {"max_processes": 0},
        {"status": "running"},
        {"wanted": "stopped"},
    ],
    ids=lambda given: str(given)[:40],
)
def test_an_invalid_change_is_refused(
    api: Api, shared_session: str, fields: dict[str, Any]
) -> None:
    before = api.get(shared_session)
    refused = patch(api, shared_session, **fields)

    assert refused.status_code == 422 or refused.status_code == 400, refused.text
    assert api.get(shared_session) == before


@pytest.fixture(scope="module")
def shared_session(api: Api) -> Iterator[str]:
    made = str(api.create()["id"])
    yield made
    api.end(made)


@pytest.mark.parametrize("wait", ["-1", "soon", "nan"])
def test_an_invalid_wait_is_refused(api: Api, shared_session: str, wait: str) -> None:
    refused = post(api, shared_session, "start", params={"wait": wait})

    assert refused.status_code in (400, 422), refused.text


# Changes


def test_labels_and_variables_apply_to_later_executions(api: Api) -> None:
    session = api.create(env_vars={"A": "1", "B": "2"}, labels={"team": "x", "old": "y"})["id"]
    assert sh(api, session, "echo $A$B$C") == "12\n"
    shown = answer(
        patch(api, session, env_vars={"B": None, "C": "3"}, labels={"old": None, "new": "z"})
    )

    assert shown["env_vars"] == {"A": "1", "C": "3"}
    assert shown["labels"] == {"team": "x", "new": "z"}
    assert sh(api, session, "echo $A$B$C") == "13\n"
    do(api, session, "stop")
    answer(patch(api, session, env_vars={"C": "4"}))
    assert api.get(session)["status"] == "stopped"
    assert sh(api, session, "echo $A$B$C") == "14\n"
    api.end(session)


def test_one_request_extends_the_life_of_a_session(api: Api) -> None:
    session = api.create(timeout=60)["id"]
    shown = answer(patch(api, session, timeout=1000))

    assert shown["timeout"] == 1000
    left = at(shown, "expires_at") - at(shown, "updated_at")
    assert left == timedelta(seconds=1000)
    # And made shorter.
    answer(patch(api, session, timeout=1))
    ended = await_state(api, session, "timeout")
    assert (ended["cause"], ended["wanted"]) == ("timeout", "destroyed")


@pytest.mark.slow
@pytest.mark.every_driver
def test_a_raised_memory_limit_applies_at_once(api: Api) -> None:
    session = api.create(memory="96Mi")["id"]
    hungry = "x = bytearray(160 * 2**20)\nprint(len(x))"
    assert api.run(session, hungry)["status"] == "failed"
    before = api.get(session)["container_id"]
    shown = answer(patch(api, session, memory="400Mi"))

    assert shown["resources"]["memory"] == "400Mi"
    assert api.run(session, hungry)["stdout"] == f"{160 * MiB}\n"
    answer(patch(api, session, resources={"memory": "96Mi"}))
    assert api.run(session, hungry)["status"] == "failed"
    do(api, session, "stop")
    answer(patch(api, session, memory="400Mi"))
    assert api.run(session, hungry)["stdout"] == f"{160 * MiB}\n"
    assert before is not None
    api.end(session)


def test_the_disk_of_a_session_can_change_only_while_it_is_archived(api: Api) -> None:
    session = api.create(disk="16Mi")["id"]
    sh(api, session, "head -c 8000000 /dev/zero > big")
    problem(patch(api, session, disk="64Mi"), 409, "disk_fixed")
    do(api, session, "stop")
    problem(patch(api, session, disk="64Mi"), 409, "disk_fixed")
    do(api, session, "archive")

    assert answer(patch(api, session, disk="64Mi"))["resources"]["disk"] == "64Mi"
    assert sh(api, session, "head -c 20000000 /dev/zero > bigger; stat -c %s big bigger") == (
        "8000000\n20000000\n"
    )
    api.end(session)


# By time


def test_an_idle_session_is_stopped_archived_and_deleted_automatically(api: Api) -> None:
    session = api.create(idle_timeout=1)["id"]
    api.put(session, "kept", b"here")

    # One timer at a time, or a state could be over before it is seen.
    stopped = await_state(api, session, "stopped")
    assert (stopped["cause"], stopped["wanted"]) == ("idle", "stopped")
    assert at(stopped, "rested_at") - at(stopped, "created_at") >= timedelta(seconds=1)
    answer(patch(api, session, archive_after=1))
    archived = await_state(api, session, "archived")
    assert archived["rested_at"] == stopped["rested_at"]
    rested = datetime.now(UTC) - at(stopped, "rested_at")
    delete_after = rested.seconds + 3
    answer(patch(api, session, delete_after=delete_after))
    ended = await_state(api, session, "terminated")
    assert (ended["cause"], ended["wanted"]) == ("idle", "destroyed")
    assert at(ended, "ended_at") - at(stopped, "rested_at") >= timedelta(seconds=delete_after)


@pytest.mark.slow
def test_a_session_with_a_running_execution_is_not_idle(api: Api) -> None:
    session = api.create(idle_timeout=1)["id"]
    execution = api.submit(session, "import time\ntime.sleep(3)\nprint('done')")

    assert api.result(execution)["stdout"] == "done\n"
    assert await_state(api, session, "stopped")["cause"] == "idle"
    api.end(session)


@pytest.mark.slow
def test_a_session_that_gets_requests_is_not_idle(api: Api) -> None:
    session = api.create(idle_timeout=3)["id"]
    for _ in range(5):
        seen, moments = set[str | None](), [time.monotonic()]
        while moments[-1] - moments[0] < 7:
            api.put(session, "touched", b"x")
            seen.add(api.get(session)["container_id"])
            moments.append(time.monotonic())
        # Requests arrived in each interval. If the machine was suspended for long, the session was
        # idle indeed.
        gaps = [later - moment for moment, later in zip(moments, moments[2:], strict=False)]
        if gaps and max(gaps) < 1.5:
            break
    else:
        pytest.fail("the machine stood still each time")
    (container_id,) = seen
    assert container_id is not None
    await_state(api, session, "stopped")
    api.end(session)


def test_zero_disables_a_timer(api: Api) -> None:
    session = api.create(idle_timeout=60, archive_after=60, delete_after=60)["id"]
    shown = answer(patch(api, session, idle_timeout=0, archive_after=0, delete_after=0))

    kept = {name: shown[name] for name in ("idle_timeout", "archive_after", "delete_after")}
    assert set(kept.values()) == {None}
    do(api, session, "stop")
    # A stopped session has no expiry.
    answer(patch(api, session, timeout=1))
    assert answer(patch(api, session, archive_after=1))["archive_after"] == 1
    assert await_state(api, session, "archived")["cause"] in ("user", "idle")
    assert api.get(session)["ended_at"] is None
    api.end(session)


# What runs when it is stopped


@pytest.mark.parametrize("verb", ["stop", "archive"])
def test_stopping_a_session_cancels_its_executions_and_starts_none(
    api: Api, session: str, verb: str
) -> None:
    running = api.submit(session, "open('begun', 'w').close()\n" + until("never"), timeout=60)
    waiting = [api.submit(session, "open('no', 'w')", timeout=60) for _ in range(3)]
    eventually(lambda: "begun" in api.names(session))
    shown = do(api, session, verb)

    assert shown["status"] == {"stop": "stopped", "archive": "archived"}[verb]
    for execution in (running, *waiting):
        record = api.execution(execution)
        assert (record["status"], record["cause"]) == ("cancelled", "user"), record
        assert "stopped" in record["error"]["message"]
    assert api.get(session)["status"] == shown["status"]
    assert api.names(session) == ["begun"]


@pytest.mark.slow
@pytest.mark.every_driver
@pytest.mark.parametrize("verb", ["stop", "archive"])
def test_requests_during_a_stop_work_or_are_refused_clearly(
    api: Api, session: str, verb: str
) -> None:
    api.put(session, "kept", b"here")
    with ThreadPoolExecutor(9) as pool:
        stopping = pool.submit(post, api, session, verb)
        reading = [
            pool.submit(api.http.get, f"{V1}/sessions/{session}/files/kept") for _ in range(8)
        ]
        assert stopping.result().status_code == 200
        for found in reading:
            response = found.result()
            if response.status_code == 200:
                assert response.content == b"here"
            else:
                # Refused, or cut off in the middle.
                assert response.status_code == 503, response.text
                assert response.json()["code"] in ("session_not_ready", "link_lost")
                assert int(response.headers["retry-after"]) >= 1
    assert sh(api, session, "cat kept") == "here"


# Concurrent requests


def test_concurrent_starts_create_one_instance(api: Api, own: Server, session: str) -> None:
    do(api, session, "stop")
    with made(own) as names, ThreadPoolExecutor(8) as pool:
        shown = list(pool.map(lambda _: do(api, session, "start"), range(8)))
    assert {each["status"] for each in shown} == {"running"}
    assert {each["container_id"] for each in shown} == names
    assert len(names) == 1


@pytest.mark.slow
@pytest.mark.every_driver
@pytest.mark.parametrize("rest", ["stop", "archive", PAUSE])
def test_concurrent_requests_start_a_stopped_session_once(
    api: Api, own: Server, session: str, rest: str
) -> None:
    api.put(session, "kept", b"here")
    before = do(api, session, rest)["container_id"]

    def request(number: int) -> str:
        if number % 2:
            return api.http.get(f"{V1}/sessions/{session}/files/kept").text
        return str(api.run(session, "print(open('kept').read(), end='')")["stdout"])

    with made(own) as names, ThreadPoolExecutor(10) as pool:
        responses = list(pool.map(request, range(10)))
    assert set(responses) == {"here"}
    assert len(names) == (0 if rest == "pause" else 1)
    assert api.get(session)["container_id"] == (before if rest == "pause" else names.pop())


def test_concurrent_starts_and_stops_end_in_the_last_wanted_state(
    api: Api, own: Server, session: str
) -> None:
    api.put(session, "kept", b"here")
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: post(api, session, ("stop", "start")[n % 2]), range(16)))
    assert {found.status_code for found in answers} == {200}
    assert do(api, session, "start")["status"] == "running"
    assert sh(api, session, "cat kept") == "here"
    assert do(api, session, "stop")["status"] == "stopped"
    held = {api.get(item["id"])["container_id"] for item in _sessions(api)} - {None}
    eventually(lambda: drivers.instances(own.data_dir) <= held)


def _sessions(api: Api) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answer(api.http.get(f"{V1}/sessions?limit=500"))["items"]
    return found


# The end


@pytest.mark.every_driver
@pytest.mark.parametrize("state", ["run", "stop", "archive", PAUSE])
def test_a_session_can_be_deleted_in_every_state_and_leaves_nothing(
    api: Api, own: Server, state: str
) -> None:
    def entries() -> set[str]:
        return drivers.instances(own.data_dir) | drivers.workspaces(own.data_dir)

    before = entries()
    session = api.create()["id"]
    api.put(session, "kept", b"here")
    if state != "run":
        do(api, session, state)
    ended = api.end(session)

    assert (ended["status"], ended["wanted"], ended["cause"]) == ("terminated", "destroyed", "user")
    assert ended["observed"] in ("destroying", "destroyed")
    eventually(lambda: api.get(session)["observed"] == "destroyed")
    # For a moment there may be one by which a session of before is saved.
    eventually(lambda: entries() <= before)
    assert api.end(session)["ended_at"] == ended["ended_at"]


@pytest.mark.every_driver
@pytest.mark.parametrize("verb", ["start", "stop", "archive", PAUSE])
def test_a_session_can_be_deleted_during_every_transition(api: Api, own: Server, verb: str) -> None:
    session = api.create()["id"]
    api.put(session, "kept", b"here")
    if verb == "start":
        do(api, session, "stop")
    do(api, session, verb, wait=0)
    api.end(session)

    eventually(lambda: api.get(session)["observed"] == "destroyed")
    shown = api.get(session)
    assert (shown["status"], shown["cause"]) == ("terminated", "user")
    held = {item["container_id"] for item in _sessions(api)}
    eventually(lambda: drivers.instances(own.data_dir) <= held)


# Clones


def test_a_clone_has_the_files_and_settings_of_its_origin_and_a_life_of_its_own(api: Api) -> None:
    first = api.create(
        env_vars={"A": "1"}, labels={"team": "x"}, memory="128Mi", timeout=500, idle_timeout=300
    )
    session = first["id"]
    sh(api, session, "mkdir d; echo one > d/f; ln -s d/f link")
    shown = answer(post(api, session, "clone", json={"labels": {"copy": "yes"}}), 201)

    assert shown["id"] != session
    assert (shown["status"], shown["started_from"]) == ("running", session)
    assert shown["labels"] == {"team": "x", "copy": "yes"}
    for name in ("env_vars", "resources", "timeout", "idle_timeout", "template_id"):
        assert shown[name] == first[name], name
    assert sh(api, shown["id"], "cat link; echo $A") == "one\n1\n"
    sh(api, shown["id"], "echo two > d/f")
    sh(api, session, "echo three > d/g")
    assert sh(api, session, "cat d/f") == "one\n"
    assert sh(api, shown["id"], "ls d") == "f\n"
    api.end(session)
    assert sh(api, shown["id"], "cat d/f") == "two\n"
    api.end(shown["id"])


@pytest.mark.every_driver
@pytest.mark.parametrize("state", ["stop", "archive"])
def test_cloning_a_stopped_session_does_not_start_it(api: Api, session: str, state: str) -> None:
    api.put(session, "kept", b"here")
    status = do(api, session, state)["status"]
    clone = answer(post(api, session, "clone"), 201)["id"]

    assert sh(api, clone, "cat kept") == "here"
    assert api.get(session)["status"] == status
    assert sh(api, session, "cat kept") == "here"
    api.end(clone)


def test_a_session_can_be_cloned_while_code_runs(api: Api, session: str) -> None:
    code = "open('begun', 'w').write('x')\n" + until("go") + "print('done')"
    execution = api.submit(session, code, timeout=60)
    eventually(lambda: "begun" in api.names(session))
    clone = answer(post(api, session, "clone"), 201)["id"]

    assert "begun" in api.names(clone)
    assert answer(api.http.get(f"{V1}/sessions/{clone}/executions"))["items"] == []
    api.put(session, "go")
    assert api.result(execution)["stdout"] == "done\n"
    api.end(clone)


@pytest.mark.slow
@pytest.mark.every_driver
@pytest.mark.parametrize("disk", ["1Mi", "100Pi"])
def test_a_failed_clone_leaves_nothing(api: Api, own: Server, disk: str) -> None:
    session = api.create(disk="32Mi")["id"]
    sh(api, session, "head -c 20000000 /dev/urandom > big")
    before = {item["id"] for item in _sessions(api)}
    there = drivers.workspaces(own.data_dir)
    refused = post(api, session, "clone", json={"disk": disk})

    assert refused.status_code >= 400
    assert refused.headers["content-type"] == "application/problem+json"
    new = [item for item in _sessions(api) if item["id"] not in before]
    assert {item["status"] for item in new} <= {"failed"}
    eventually(lambda: drivers.workspaces(own.data_dir) <= there)
    api.end(session)


# Once


def test_a_clone_with_a_key_is_created_once(api: Api, session: str) -> None:
    headers = {"Idempotency-Key": secrets.token_hex(8)}
    first = answer(post(api, session, "clone", headers=headers), 201)

    assert answer(post(api, session, "clone", headers=headers), 201) == first
    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda _: post(api, session, "clone", headers=headers), range(4)))
    assert {answer(found, 201)["id"] for found in again} == {first["id"]}
    problem(
        post(api, session, "clone", headers=headers, json={"timeout": 5}),
        422,
        "idempotency_key_reused",
    )
    api.end(first["id"])


def test_a_start_with_a_key_is_replayed(api: Api, session: str) -> None:
    do(api, session, "stop")
    headers = {"Idempotency-Key": secrets.token_hex(8)}
    first = answer(post(api, session, "start", headers=headers))
    do(api, session, "stop")

    again = post(api, session, "start", headers=headers)
    assert answer(again) == first
    assert again.headers["idempotency-replayed"] == "true"
    assert api.get(session)["status"] == "stopped"
