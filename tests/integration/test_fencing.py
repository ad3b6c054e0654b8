"""
A replica that was suspended for too long resumes and does no harm.

It counted as lost, and others took over its executions, which it does not know yet. No execution is
run twice, no result is overwritten, and its own clients receive the results of the others.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem, until
from tests.integration.replicas import LONG, Cluster, Member, lines, note, result_of, running


@pytest.fixture(scope="module")
def shared(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("fencing")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared.start()
    for member in shared.members:
        member.resume()


@pytest.fixture
def session(cluster: Cluster) -> Iterator[str]:
    session_id = str(cluster[0].api.create()["id"])
    yield session_id
    cluster[0].resume()
    cluster[0].api.end(session_id)


def owner_of(cluster: Cluster, number: int, session: str) -> str:
    """The id under which a member owns executions."""
    api = cluster[number].api
    return cluster.holder(api.run(session, "print(1)")["execution_id"])


def wait_for_takeover(cluster: Cluster, *execution_ids: str) -> None:
    """Wait until the other member owns them, according to its log."""
    for execution_id in execution_ids:
        eventually(
            functools.partial(logs_event, cluster[1], "execution.adopted", execution_id), LONG
        )


def logs_event(member: Member, event: str, execution_id: str) -> bool:
    return any(event in line for line in member.stderr().splitlines() if execution_id in line)


def works(cluster: Cluster, session: str) -> None:
    """Whether it works as before."""
    for member in (cluster[0], cluster[1], cluster[0]):
        assert member.api.run(session, "print(2)")["stdout"] == "2\n"
    assert cluster[0].api.run(cluster[0].api.create()["id"], "print(3)")["stdout"] == "3\n"


def test_an_execution_of_a_suspended_replica_is_finished_once_by_another(
    cluster: Cluster, session: str
) -> None:
    a, b = cluster[0].api, cluster[1].api
    first, second = (owner_of(cluster, number, session) for number in range(2))
    assert first != second
    runs = a.submit(session, note("first") + until("go") + "print('over')", timeout=600)
    running(a, runs)
    waits = a.submit(session, note("second") + "print('waited')")
    assert [cluster.holder(runs), cluster.holder(waits)] == [first, first]
    with ThreadPoolExecutor(2) as threads:
        # Clients of the suspended member, which wait with it.
        theirs = [threads.submit(result_of, a, execution_id) for execution_id in (runs, waits)]
        cluster[0].pause()
        wait_for_takeover(cluster, runs, waits)
        b.put(session, "go")
        results = [result_of(b, runs), result_of(b, waits)]
        before = [cluster.row(runs), cluster.row(waits)]
        cluster[0].resume()
        assert [future.result() for future in theirs] == results

    assert [result["stdout"] for result in results] == ["over\n", "waited\n"]
    assert lines(b, session) == ["first", "second"]
    works(cluster, session)
    assert [cluster.row(runs), cluster.row(waits)] == before
    assert [row["holder"] for row in before] == [second, second]
    assert [a.result(runs), a.result(waits)] == results
    log = cluster[0].stderr()
    assert "replica.was_lost" in log
    assert owner_of(cluster, 0, session) == first


def test_a_resumed_replica_leaves_its_execution_to_the_new_owner(
    cluster: Cluster, session: str
) -> None:
    a, b = cluster[0].api, cluster[1].api
    second = owner_of(cluster, 1, session)
    code = "print('begun', flush=True)\n" + note("first") + until("go") + "print('over')"
    runs = a.submit(session, code, timeout=600)
    running(a, runs)
    waits = a.submit(session, note("second"))
    events = a.events(runs)
    assert [next(events)[1], next(events)[2]] == ["started", {"text": "begun\n"}]
    cluster[0].pause()
    wait_for_takeover(cluster, runs, waits)
    cluster[0].resume()
    eventually(lambda: logs_event(cluster[0], "execution.owned_elsewhere", runs), LONG)
    # Still under way: neither has ended it.
    assert b.http.get(f"{V1}/executions/{runs}/result").status_code == 409
    b.put(session, "go")

    result = result_of(b, runs)
    assert (result["status"], result["stdout"]) == ("success", "begun\nover\n")
    assert result_of(a, runs) == result
    # Events that it missed are taken from the record.
    assert [event[1:] for event in events] == [("stdout", {"text": "over\n"}), ("result", result)]
    assert result_of(a, waits) == result_of(b, waits)
    assert lines(b, session) == ["first", "second"]
    assert [cluster.holder(runs), cluster.holder(waits)] == [second, second]
    works(cluster, session)


def test_a_queued_execution_of_a_suspended_replica_is_not_run_twice(
    cluster: Cluster, session: str
) -> None:
    """A new instance knows nothing of what ran in the last one, and would run it."""
    a, b = cluster[0].api, cluster[1].api
    runs = a.submit(session, note("first") + until("go"), timeout=600)
    running(a, runs)
    waits = [a.submit(session, note(f"{number}")) for number in range(5)]
    cluster[0].pause()
    wait_for_takeover(cluster, runs, *waits)
    b.put(session, "go")
    results = [result_of(b, execution_id) for execution_id in (runs, *waits)]
    cluster.kill_instance(b.get(session)["container_id"])
    assert b.run(session, "print(1)")["stdout"] == "1\n"
    cluster[0].resume()

    assert [result_of(a, execution_id) for execution_id in (runs, *waits)] == results
    works(cluster, session)
    assert lines(b, session) == ["first", "0", "1", "2", "3", "4"]


def test_a_replica_suspended_while_it_waited_for_another_runs_nothing_twice(
    cluster: Cluster, session: str
) -> None:
    a, b = cluster[0].api, cluster[1].api
    runs = b.submit(session, note("first") + until("go"), timeout=600)
    running(b, runs)
    waits = [a.submit(session, note("second")), a.submit(session, note("third"))]
    cluster[0].pause()
    wait_for_takeover(cluster, *waits)
    b.put(session, "go")
    results = [result_of(b, execution_id) for execution_id in (runs, *waits)]
    cluster[0].resume()

    assert [result_of(a, execution_id) for execution_id in (runs, *waits)] == results
    assert {result["status"] for result in results} == {"success"}
    works(cluster, session)
    assert lines(b, session) == ["first", "second", "third"]


def test_a_briefly_suspended_replica_continues(cluster: Cluster, session: str) -> None:
    """Shorter than it may: nothing changes hands."""
    a = cluster[0].api
    first = owner_of(cluster, 0, session)
    runs = a.submit(session, note("first") + until("go"), timeout=600)
    running(a, runs)
    cluster[0].pause()
    cluster[0].resume()
    a.put(session, "go")

    assert result_of(a, runs)["status"] == "success"
    assert cluster.holder(runs) == first
    assert lines(a, session) == ["first"]


def test_accepted_executions_run_exactly_once_whenever_a_replica_is_suspended(
    cluster: Cluster,
) -> None:
    """Somewhere between taking, recording, starting and ending one: a different place each time."""
    chance = random.Random(20)
    b = cluster[1].api
    sessions = [str(b.create(timeout=600)["id"]) for _ in range(8)]
    count = 0
    for token in ("first", "second", "third", "fourth"):
        with ThreadPoolExecutor(2 * len(sessions)) as threads, cluster[0].calling() as a:
            sent = [(session, threads.submit(send, a, session, token)) for session in sessions * 2]
            # The place is the point, and only time leads there.
            eventually(Countdown(chance.randrange(8)))
            cluster[0].pause()
            eventually(functools.partial(is_only_member, cluster), LONG)
            for execution_id in cluster.unfinished():
                result_of(b, execution_id)
            cluster[0].resume()
            accepted = [(session, future.result()) for session, future in sent]
        taken = [execution_id for _, execution_id in accepted if execution_id is not None]
        count += len(taken)
        for execution_id in taken:
            for member in cluster.members:
                assert result_of(member.api, execution_id)["status"] == "success"
        for session in sessions:
            wanted = [one for one, execution_id in accepted if execution_id is not None]
            assert lines(b, session).count(token) == wanted.count(session)
    assert count > 0
    for session in sessions:
        b.end(session)


class Countdown:
    """True when it was asked so many times."""

    def __init__(self, count: int) -> None:
        self._left = count

    def __call__(self) -> bool:
        self._left -= 1
        return self._left < 0


def send(api: Api, session: str, token: str) -> str | None:
    """Waits while the member that receives it is suspended; null if that did not accept it."""
    response = api.execute(session, code=note(token))
    if response.status_code == 503:
        problem(response, 503, "coordination_unavailable")
        return None
    return str(answer(response, 202)["execution_id"])


def is_only_member(cluster: Cluster) -> bool:
    """Whether only one member counts as alive."""
    return cluster.redis.execute("KEYS", "*:alive").startswith("*1\r\n")


def test_the_delayed_response_of_a_suspended_replica_is_the_stored_one(
    cluster: Cluster, session: str
) -> None:
    a, b = cluster[0].api, cluster[1].api
    headers = {"Idempotency-Key": f"fencing-{session}"}
    fields = {"code": note("once") + until("go") + "print('over')", "wait": 60, "timeout": 600}

    def post(api: Api) -> httpx.Response:
        return api.http.post(f"{V1}/sessions/{session}/execute", json=fields, headers=headers)

    answers: list[httpx.Response] = []

    def is_answered() -> bool:
        answers.append(post(b))
        return answers[-1].status_code != 409

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(post, a)
        eventually(lambda: lines(b, session) == ["once"])
        cluster[0].pause()
        b.put(session, "go")
        eventually(is_answered, LONG)
        cluster[0].resume()
        late = first.result()

    assert answer(answers[-1])["stdout"] == "over\n"
    assert late.json() == answers[-1].json()
    assert post(a).json() == answers[-1].json()
    assert lines(b, session) == ["once"]
    works(cluster, session)
