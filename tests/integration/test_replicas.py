"""Several replicas on one database, one Redis and one node are one service to their clients."""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem, until
from tests.integration.replicas import (
    LONG,
    Cluster,
    Member,
    concurrently,
    lines,
    note,
    result_of,
    running,
)
from tests.servers.process import DatabaseServer

DATABASES = ["sqlite", "mariadb", "postgresql"]


def new_database(kind: str, request: pytest.FixtureRequest) -> str | None:
    if kind == "sqlite":
        return None
    server: DatabaseServer = request.getfixturevalue(kind)
    return server.new_database()


@pytest.fixture(scope="module", params=DATABASES)
def any_database(
    request: pytest.FixtureRequest, bubblewrap: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp(f"replicas-{request.param}")
    with Cluster(directory, database_url=new_database(request.param, request)) as cluster:
        yield cluster


@pytest.fixture
def pair(any_database: Cluster) -> tuple[Api, Api]:
    """Two members' clients, on every kind of database."""
    first, second = any_database.apis
    return first, second


@pytest.fixture(scope="module")
def shared(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("replicas"), size=3) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """Three members, whose death the next test does not notice."""
    return shared.start()


@pytest.fixture
def session(cluster: Cluster) -> Iterator[str]:
    session_id = str(cluster[0].api.create()["id"])
    yield session_id
    cluster.start()[0].api.end(session_id)


# Through any of them


def test_an_execution_can_be_waited_for_through_another_replica(pair: tuple[Api, Api]) -> None:
    a, b = pair
    session = a.create()["id"]
    execution_id = a.submit(session, "print('begun', flush=True)\n" + until("go") + "print('over')")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(result_of, b, execution_id)
        running(a, execution_id)
        b.put(session, "go")
        result = waiting.result()

    assert (result["status"], result["stdout"]) == ("success", "begun\nover\n")
    assert a.result(execution_id) == result
    assert a.execution(execution_id) == b.execution(execution_id)
    a.end(session)


def test_an_execution_can_be_followed_through_another_replica(pair: tuple[Api, Api]) -> None:
    a, b = pair
    session = a.create()["id"]
    execution_id = a.submit(session, "print('begun', flush=True)\n" + until("go") + "print('over')")
    running(a, execution_id)
    events = b.events(execution_id)
    assert next(events)[1] == "started"
    number, name, content = next(events)
    assert (name, content) == ("stdout", {"text": "begun\n"})
    # Nothing ends by itself, so all events so far arrived while it ran.
    a.put(session, "go")
    rest = list(events)

    assert [name for _, name, _ in rest] == ["stdout", "result"]
    assert rest[0][2] == {"text": "over\n"}
    assert rest[1][2] == a.result(execution_id)
    # A client that resumes at another replica receives the remaining events.
    assert list(a.events(execution_id, after=number)) == rest
    b.end(session)


def test_running_and_queued_executions_are_cancelled_through_another_replica(
    pair: tuple[Api, Api],
) -> None:
    a, b = pair
    session = a.create()["id"]
    runs: list[str] = []

    def run() -> str:
        runs.append(a.submit(session, note("ran") + until("never"), timeout=600))
        running(a, runs[-1])
        return runs[-1]

    run()
    # On a slow machine one notification may be late, but not the next as well.
    for here, there in ((a, b), (b, a)):
        waits = (here.submit(session, note("waited")) for _ in range(3))
        assert any(is_notified_of_cancellation(there, execution_id) for execution_id in waits)
    assert is_notified_of_cancellation(b, runs[0]) or any(
        is_notified_of_cancellation(b, run()) for _ in range(2)
    )

    assert lines(b, session) == ["ran"] * len(runs)
    assert a.run(session, "print(1)")["stdout"] == "1\n"
    b.end(session)


def is_notified_of_cancellation(api: Api, execution_id: str) -> bool:
    """
    Cancel it. Returns whether a waiting request was notified; polling would take longer, see
    `LOOK_SECONDS`.
    """
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(api.http.get, f"{V1}/executions/{execution_id}/result?wait=4")
        reply = answer(api.http.post(f"{V1}/executions/{execution_id}/cancel"))
        assert (reply["status"], reply["cause"]) == ("cancelled", "user")
        response = waiting.result()
    if response.status_code == 409:
        problem(response, 409, "execution_not_finished")
        return False
    assert answer(response)["cause"] == "user"
    return True


def test_a_session_is_deleted_through_another_replica(
    pair: tuple[Api, Api], any_database: Cluster
) -> None:
    a, b = pair
    session = a.create()
    runs = a.submit(session["id"], until("never"), timeout=600)
    running(a, runs)
    waits = b.submit(session["id"], "print(1)")
    assert b.end(session["id"])["status"] == "terminated"

    for execution_id in (runs, waits):
        for api in pair:
            assert result_of(api, execution_id)["cause"] == "user"
            assert api.status(execution_id) == "cancelled"
    for api in pair:
        problem(api.execute(session["id"], code="print(1)"), 409, "session_ended")
    eventually(lambda: session["container_id"] not in any_database.instances())
    eventually(lambda: session["container_id"] not in any_database.workspaces())
    eventually(lambda: a.get(session["id"])["observed"] == "destroyed")
    assert a.get(session["id"]) == b.get(session["id"])


def test_files_and_lists_are_the_same_through_any_replica(pair: tuple[Api, Api]) -> None:
    a, b = pair
    mark = uuid.uuid4().hex
    session = a.create(env_vars={"MARK": mark})["id"]
    a.put(session, "from-a", b"a")
    b.put(session, "from-b", b"b")
    result = b.run(session, "print(open('from-a').read() + open('from-b').read())")
    assert result["stdout"] == "ab\n"
    for api in pair:
        assert sorted(api.names(session)) == ["from-a", "from-b"]
        assert api.http.get(f"{V1}/sessions/{session}/files/from-b").content == b"b"
    waiting = [a.submit(session, "print(1)"), b.submit(session, "print(2)")]
    for execution_id in waiting:
        result_of(a, execution_id)

    for path in (
        f"sessions/{session}",
        f"sessions/{session}/executions",
        "sessions?limit=100",
        f"executions/{waiting[1]}/status",
        "templates",
    ):
        first, second = (answer(api.http.get(f"{V1}/{path}")) for api in pair)
        assert first == second
    assert [item["id"] for item in answer(b.http.get(f"{V1}/sessions"))["items"]
            if item["env_vars"].get("MARK") == mark] == [session]  # fmt: skip
    a.end(session)


def test_a_template_changed_on_one_replica_is_used_by_the_other(pair: tuple[Api, Api]) -> None:
    a, b = pair

    def put(api: Api, number: int) -> None:
        fields = {"name": "t", "env": {"NUMBER": str(number)}, "pool_size": number % 2}
        answer(api.http.put(f"{V1}/templates/changing", json=fields))

    fields = {"id": "changing", "name": "t", "env": {"NUMBER": "0"}}
    answer(a.http.post(f"{V1}/templates", json=fields), 201)
    sessions = []
    for number in range(1, 5):
        here, there = (a, b) if number % 2 else (b, a)
        put(here, number)
        shown = answer(there.http.get(f"{V1}/templates/changing"))
        assert shown["env"] == {"NUMBER": str(number)}

        # The notification is sent with the response: immediately, but not before it.
        def is_listed(api: Api = there, wanted: str = str(number)) -> bool:
            session = api.create(template_id="changing")
            sessions.append(session["id"])
            return bool(session["env_vars"]["NUMBER"] == wanted)

        eventually(is_listed)
        for api in pair:
            problem(api.http.delete(f"{V1}/templates/changing"), 409, "template_in_use")
    for session in sessions:
        a.end(session)
    assert b.http.delete(f"{V1}/templates/changing").status_code == 204
    eventually(lambda: _unknown(a))


def _unknown(api: Api) -> bool:
    response = api.http.post(f"{V1}/sessions", json={"template_id": "changing"})
    if response.status_code == 201:
        api.end(response.json()["id"])
    return response.status_code == 404


def test_an_api_key_is_valid_and_revoked_on_all_replicas(any_database: Cluster) -> None:
    made = json.loads(any_database.command("key", "create", "of-the-test", "--json"))

    def statuses() -> list[int]:
        headers = {"Authorization": f"Bearer {made['key']}"}
        return [
            httpx.get(f"{member.url}{V1}/sessions", headers=headers, timeout=60).status_code
            for member in any_database.members
        ]

    eventually(lambda: statuses() == [200, 200])
    any_database.command("key", "rm", made["id"])
    eventually(lambda: statuses() == [401, 401])


# Once


def post(api: Api, path: str, key: str, **fields: Any) -> httpx.Response:
    return api.http.post(f"{V1}/{path}", json=fields, headers={"Idempotency-Key": key})


def response_after_conflicts(api: Api, path: str, key: str, **fields: Any) -> httpx.Response:
    """Asked again while another replica works on it."""
    answers: list[httpx.Response] = []

    def settled() -> bool:
        answers.append(post(api, path, key, **fields))
        return answers[-1].status_code != 409

    eventually(settled, LONG)
    return answers[-1]


@pytest.mark.parametrize("wait", [0, 20], ids=["submitted", "waited for"])
def test_a_request_repeated_at_another_replica_is_handled_once(
    pair: tuple[Api, Api], wait: int
) -> None:
    a, b = pair
    session = a.create()["id"]
    key = str(uuid.uuid4())
    first = post(a, f"sessions/{session}/execute", key, code=note("once"), wait=wait)
    second = post(b, f"sessions/{session}/execute", key, code=note("once"), wait=wait)

    assert first.is_success
    assert second.content == first.content
    assert second.headers["Idempotency-Replayed"] == "true"
    result_of(a, first.json()["execution_id"])
    assert lines(a, session) == ["once"]
    a.end(session)


def test_a_request_sent_to_all_replicas_at_once_is_handled_once(
    pair: tuple[Api, Api], any_database: Cluster
) -> None:
    a, _ = pair
    session = a.create()["id"]
    for number in range(5):
        key, code = str(uuid.uuid4()), note(str(number))

        def send(member: Member, key: str = key, code: str = code) -> httpx.Response:
            with member.calling() as api:
                return response_after_conflicts(
                    api, f"sessions/{session}/execute", key, code=code, wait=20
                )

        sent = concurrently(
            *(functools.partial(send, member) for member in any_database.members * 2)
        )
        assert len({response.content for response in sent}) == 1, sent
        assert sent[0].json()["status"] == "success"
    assert lines(a, session) == [str(number) for number in range(5)]
    a.end(session)


# One at a time

SPAN = r"""
import time
began = time.monotonic()
time.sleep(0.003)
with open("spans", "a") as file: file.write(f"{TOKEN} {began} {time.monotonic()}\n")
"""


def spans(api: Api, session: str) -> list[tuple[str, float, float]]:
    found = [line.split() for line in lines(api, session, "spans")]
    return [(token, float(began), float(over)) for token, began, over in found]


def check_apart(found: list[tuple[str, float, float]]) -> None:
    for before, after in itertools.pairwise(found):
        assert before[2] <= after[1], f"{before[0]} and {after[0]} ran at the same time"


def test_executions_of_one_session_never_overlap_and_alternate(
    cluster: Cluster, session: str
) -> None:
    count = 40

    def drive(member: Member, client: int) -> None:
        with member.calling() as api:
            for number in range(count // 2):
                code = SPAN.replace("{TOKEN}", f"{member.name}-{client}.{number}")
                assert api.run(session, code)["status"] == "success"

    # Two clients each: while one is slow, the other keeps its member in the line.
    clients = itertools.product(cluster.members, range(2))
    concurrently(*(functools.partial(drive, member, client) for member, client in clients))

    found = spans(cluster[0].api, session)
    assert len({token for token, _, _ in found}) == len(found) == count * len(cluster)
    check_apart(found)
    # With all members waiting, none gets the lease much more often than the others.
    names = [token.rsplit("-", 1)[0] for token, _, _ in found]
    first_over = min(len(names) - 1 - names[::-1].index(member.name) for member in cluster.members)
    for member in cluster.members:
        assert names[: first_over + 1].count(member.name) >= count // 3, names


def test_executions_run_in_the_order_of_their_arrival_at_any_replica(
    cluster: Cluster, session: str
) -> None:
    first = cluster[0].api.submit(session, until("go"), timeout=600)
    running(cluster[0].api, first)
    waiting = []
    for number in range(1, 3):
        waiting.append(cluster[number].api.submit(session, note(str(number))))
        eventually(functools.partial(is_queued, cluster, session, number))
    cluster[0].api.put(session, "go")
    for execution_id in waiting:
        assert result_of(cluster[0].api, execution_id)["status"] == "success"

    assert lines(cluster[0].api, session) == ["1", "2"]


def is_queued(cluster: Cluster, session: str, count: int) -> bool:
    response = cluster.redis.execute("ZCARD", f"{{{cluster.prefix}:{session}}}:line")
    return response == f":{count}\r\n"


# The end of one


def test_a_stopped_replica_hands_over_at_once(cluster: Cluster, session: str) -> None:
    b = cluster[1].api
    with cluster.extra_member("leaves", ATOLL_COORDINATION__PRESENCE_TTL="120") as member:
        a = member.api
        runs = a.submit(session, note("first") + until("go") + "print('over')", timeout=600)
        running(a, runs)
        waits = a.submit(session, note("second"))
        former = cluster.holder(runs)
        assert member.stop() == 0

    # It announced its shutdown, so nothing waits for it to count as lost; see `LEAVING`.
    eventually(lambda: former not in (cluster.holder(runs), cluster.holder(waits)), LONG)
    b.put(session, "go")
    assert result_of(b, runs)["stdout"] == "over\n"
    assert result_of(b, waits)["status"] == "success"
    assert lines(b, session) == ["first", "second"]


@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_queued_execution_does_not_overlap_one_of_a_lost_replica(
    cluster: Cluster, session: str, way: signal.Signals
) -> None:
    """One waits at another replica, which gets the lease before it is known what still runs."""
    a, b = cluster[0].api, cluster[1].api
    code = (
        "import time\nbegan = time.monotonic()\n"
        + until("go")
        + SPAN.replace("began = time.monotonic()", "")
    )
    runs = a.submit(session, code.replace("{TOKEN}", "first"), timeout=600)
    running(a, runs)
    waits = b.submit(session, SPAN.replace("{TOKEN}", "second"))
    eventually(functools.partial(is_queued, cluster, session, 1))
    cluster[0].kill() if way == signal.SIGKILL else cluster[0].stop()
    eventually(lambda: "execution.adopted" in adopted(cluster, runs), LONG)
    # Long enough for the other to have begun, if nothing keeps it.
    unexpected = b.http.get(f"{V1}/executions/{waits}/result?wait=1")
    b.put(session, "go")
    results = [result_of(b, runs), result_of(b, waits)]

    assert [result["status"] for result in results] == ["success", "success"]
    assert unexpected.status_code == 409
    found = spans(b, session)
    assert [token for token, _, _ in found] == ["first", "second"]
    check_apart(found)


def test_an_execution_queued_behind_one_of_a_lost_replica_can_be_cancelled(
    cluster: Cluster, session: str
) -> None:
    a, b = cluster[0].api, cluster[1].api
    runs = a.submit(session, until("go"), timeout=600)
    running(a, runs)
    waits = b.submit(session, note("second"))
    eventually(functools.partial(is_queued, cluster, session, 1))
    cluster[0].kill()
    eventually(lambda: "session.busy" in adopted(cluster, runs), LONG)
    response = answer(b.http.post(f"{V1}/executions/{waits}/cancel"))

    assert (response["status"], response["cause"]) == ("cancelled", "user")
    assert b.execution(waits)["started_at"] is None
    b.put(session, "go")
    assert result_of(b, runs)["status"] == "success"
    assert lines(b, session) == []


def test_a_replica_that_follows_an_execution_of_another_stops_at_once(
    cluster: Cluster, session: str
) -> None:
    a = cluster[0].api
    runs = a.submit(session, until("go"), timeout=600)
    running(a, runs)
    with cluster.extra_member("follows", ATOLL_SHUTDOWN_TIMEOUT="60") as member:
        with member.calling() as leaves:
            assert next(leaves.events(runs))[1] == "started"
        began = time.monotonic()
        assert member.stop() == 0
        # Sooner than the time after which requests in progress would be abandoned.
        assert time.monotonic() - began < 30
    a.put(session, "go")
    assert result_of(a, runs)["status"] == "success"


def test_queued_executions_run_after_redis_lost_its_data(cluster: Cluster, session: str) -> None:
    a = cluster[0].api
    for member in cluster.members[1:]:
        member.stop()  # Else one of them may take it over, and cannot know that it has not begun.
    cluster.kill_instance(a.get(session)["container_id"])
    # Another call creates an instance, so the lease of the session is held and nothing is sent.
    cluster.redis.execute("SET", f"{{{cluster.prefix}:somebody}}:alive", "1")
    other = '["somebody", "else"]\ntoken'
    cluster.redis.execute("SET", f"{{{cluster.prefix}:instance:{session}}}:lease", other)
    waits = a.submit(session, note("once"))
    eventually(functools.partial(is_queued, cluster, f"instance:{session}", 1))
    cluster.redis.execute("FLUSHALL")

    assert result_of(a, waits)["status"] == "success"
    assert lines(a, session) == ["once"]


def adopted(cluster: Cluster, execution_id: str) -> str:
    """What members log of an execution."""
    logs = "".join(member.stderr() for member in cluster.members)
    return "\n".join(line for line in logs.splitlines() if execution_id in line)


def test_another_replica_takes_over_from_a_killed_one(cluster: Cluster, session: str) -> None:
    a, b = cluster[0].api, cluster[1].api
    code = "print('begun', flush=True)\n" + note("first") + until("go") + "print('over')"
    runs = a.submit(session, code, timeout=600)
    running(a, runs)
    waits = [a.submit(session, note("second")), a.submit(session, note("third"))]
    events = b.events(runs)
    assert [next(events)[1], next(events)[2]] == ["started", {"text": "begun\n"}]
    with ThreadPoolExecutor(1) as threads, cluster[2].calling() as c:
        waiting = threads.submit(result_of, c, runs)
        cluster[0].kill()
        b.put(session, "go")
        result = waiting.result()

    assert (result["status"], result["stdout"]) == ("success", "begun\nover\n")
    # A client that listened at another replica throughout misses nothing.
    assert [content.get("text") or content["status"] for _, _, content in events] == [
        "over\n",
        "success",
    ]
    assert [result_of(b, execution_id)["status"] for execution_id in waits] == ["success"] * 2
    assert lines(b, session) == ["first", "second", "third"]


def test_a_cancellation_sent_to_a_killed_replica_is_carried_out(
    cluster: Cluster, session: str
) -> None:
    a, b = cluster[0].api, cluster[1].api
    runs = a.submit(session, note("first") + until("never"), timeout=600)
    running(a, runs)
    waits = a.submit(session, note("second"))
    cluster[0].kill()
    for execution_id in (waits, runs):
        b.http.post(f"{V1}/executions/{execution_id}/cancel")

    for execution_id in (runs, waits):
        result_of(b, execution_id)
        assert b.status(execution_id) == "cancelled"
    assert lines(b, session) == ["first"]


def test_a_keyed_request_to_a_killed_replica_is_taken_over(cluster: Cluster, session: str) -> None:
    key = str(uuid.uuid4())
    code = note("once") + until("go") + "print('over')"
    path = f"sessions/{session}/execute"

    def send() -> None:
        with cluster[0].calling() as api, pytest.raises(httpx.TransportError):
            post(api, path, key, code=code, wait=60, timeout=600)

    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(send)
        b = cluster[1].api
        eventually(lambda: lines(b, session) == ["once"])
        cluster[0].kill()
        sent.result()
        b.put(session, "go")
        again = response_after_conflicts(b, path, key, code=code, wait=60, timeout=600)

    assert answer(again)["stdout"] == "over\n"
    assert lines(b, session) == ["once"]


# The instance


def test_a_dead_instance_is_replaced_once_for_any_number_of_requests(
    cluster: Cluster, session: str
) -> None:
    for number in range(3):
        before = cluster[0].api.get(session)["container_id"]
        pooled = cluster.instances()
        cluster[0].api.put(session, f"kept-{number}", b"here")
        for member in cluster.members:
            member.api.run(session, "print(1)")  # All of them have it at hand.
        cluster.kill_instance(before)

        def ask(member: Member, number: int = number) -> str:
            with member.calling() as api:
                return str(api.run(session, f"print(open('kept-{number}').read())")["stdout"])

        calls = [functools.partial(ask, member) for member in cluster.members * 2]
        assert concurrently(*calls) == ["here\n"] * len(calls)
        after = cluster[0].api.get(session)["container_id"]
        assert after != before
        assert {member.api.get(session)["container_id"] for member in cluster.members} == {after}
        assert cluster.instances() - pooled == {after}
        rows = cluster.rows("SELECT id FROM instances WHERE session_id = :id", id=session)
        assert [row["id"] for row in rows] == [after]


def test_another_replica_finds_an_execution_in_a_replaced_instance(
    cluster: Cluster, session: str
) -> None:
    """The instance is younger than the execution: it was made for it."""
    a, b = cluster[0].api, cluster[1].api
    cluster.kill_instance(a.get(session)["container_id"])
    runs = a.submit(session, note("once") + until("go") + "print('over')", timeout=600)
    running(a, runs)
    cluster[0].kill()
    eventually(lambda: "execution.adopted" in adopted(cluster, runs), LONG)
    b.put(session, "go")
    result = result_of(b, runs)

    assert (result["status"], result["stdout"]) == ("success", "over\n")
    assert lines(b, session) == ["once"]


def test_another_replica_can_use_a_session_that_is_being_created(cluster: Cluster) -> None:
    a, b = cluster[0].api, cluster[1].api
    for _ in range(5):
        mark = uuid.uuid4().hex
        with ThreadPoolExecutor(1) as threads, cluster[0].calling() as creator:
            # A disk of another size than the pool's: it starts cold.
            made = threads.submit(creator.create, env_vars={"MARK": mark}, disk="8Mi")
            found: list[str] = []

            def is_listed(mark: str = mark, found: list[str] = found) -> bool:
                items = answer(b.http.get(f"{V1}/sessions?limit=5"))["items"]
                found += [item["id"] for item in items if item["env_vars"].get("MARK") == mark]
                return bool(found)

            eventually(is_listed)
            result = b.run(found[0], note("once") + "print(1)")
            assert (result["status"], result["stdout"]) == ("success", "1\n")
            session = made.result()
        assert session["id"] == found[0]
        assert lines(a, session["id"]) == ["once"]
        rows = cluster.rows("SELECT id FROM instances WHERE session_id = :id", id=found[0])
        assert [row["id"] for row in rows] == [a.get(found[0])["container_id"]]
        a.end(found[0])


def test_the_next_start_clears_the_pool_of_a_killed_replica(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Cluster(tmp_path, ATOLL_POOL__SIZE="1") as cluster:
        eventually(lambda: len(cluster.instances()) == 2)
        session = cluster[0].api.create()["id"]
        cluster[1].api.put(session, "kept", b"here")
        eventually(lambda: len(cluster.instances()) == 3)
        cluster[0].kill()
        # While both run, the other one does not touch unassigned instances.
        cluster[0].start()
        eventually(lambda: len(cluster.instances()) == 4)
        for member in cluster.members:
            member.kill()
        cluster.check_node()
        cluster.start()
        assert cluster[0].api.run(session, "print(open('kept').read())")["stdout"] == "here\n"


def test_a_secret_set_at_one_replica_applies_to_executions_of_the_other(
    pair: tuple[Api, Api],
) -> None:
    first, second = pair
    session = str(first.create()["id"])
    show = "import os\nprint(os.environ.get('TOKEN'))"
    for api in pair:
        assert api.run(session, show)["stdout"] == "None\n"
    for number in range(5):
        at, other = (first, second) if number % 2 else (second, first)
        path = f"{V1}/sessions/{session}/secrets/TOKEN"
        answer(at.http.put(path, json={"value": f"value {number}"}))
        assert other.run(session, show)["stdout"] == f"value {number}\n"
    answer(first.http.delete(f"{V1}/sessions/{session}/secrets/TOKEN"))
    made = answer(second.http.post(f"{V1}/sessions/{session}/contexts", json={}), 201)
    assert second.run(session, show, context_id=made["id"])["stdout"] == "None\n"
    first.end(session)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount images")
def test_replicas_of_a_node_share_the_mounts_of_its_volumes(any_database: Cluster) -> None:
    first, second = any_database.apis
    directory = str(any_database.data_dir / "node" / "mounts")

    def mounted() -> int:
        return Path("/proc/self/mountinfo").read_text().count(directory)

    answer(first.http.post(f"{V1}/volumes", json={"id": "both", "size": "16Mi"}), 201)
    given = [{"volume_id": "both", "path": "/data/x", "read_only": False}]
    at_first, at_second = first.create(volumes=given)["id"], second.create(volumes=given)["id"]
    assert mounted() == 1
    first.run(at_first, "open('/data/x/file', 'w').write('text')")
    assert second.run(at_second, "print(open('/data/x/file').read())")["stdout"] == "text\n"
    second.end(at_first)
    assert first.run(at_second, "print(open('/data/x/file').read())")["stdout"] == "text\n"
    first.end(at_second)
    eventually(lambda: mounted() == 0)
    eventually(lambda: second.http.delete(f"{V1}/volumes/both").status_code == 204)
