"""
Redis restarts empty while replicas work: nothing hangs, and nothing runs twice.

Accepted executions continue and end; others are refused with a reason. Once Redis is available
again, everything works as before.
"""

from __future__ import annotations

import functools
import itertools
import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem, until
from tests.integration.replicas import LONG, Cluster, Member, lines, note, result_of, running

AWAY = (503, "coordination_unavailable")


@pytest.fixture(scope="module")
def shared(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("redis-restart")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    if shared.redis.process is None:
        shared.redis.start()
    recovered(shared)


def refuses(member: Member, session: str) -> bool:
    """Whether it has noticed that other replicas can no longer see that it is alive."""
    response = member.api.execute(session, code=note("asked", "asked"), wait=0.3)
    assert response.status_code in (200, 202) or problem(response, *AWAY)
    return response.status_code == 503


def accepts(member: Member, session: str) -> bool:
    response = member.api.execute(session, code="print(1)", wait=LONG)
    assert response.status_code == 503 or answer(response)["stdout"] == "1\n"
    return response.status_code == 200


def create_session(member: Member) -> str:
    """A session. What it begins before Redis knows again that it lives, it may lose."""
    found: list[str] = []

    def create() -> bool:
        response = member.api.http.post(f"{V1}/sessions", json={})
        if response.status_code == 503:
            assert response.json()["code"] in (AWAY[1], "lease_lost"), response.text
            return False
        found.append(str(answer(response, 201)["id"]))
        return True

    eventually(create, LONG)
    return found[0]


def recovered(cluster: Cluster) -> None:
    session = create_session(cluster[0])
    for member in cluster.members:
        eventually(functools.partial(accepts, member, session), LONG)
    for member in cluster.members:
        assert member.api.run(session, "print(2)")["stdout"] == "2\n"
    cluster[1].api.end(session)


def outage(cluster: Cluster, way: str, session: str) -> None:
    cluster.redis.kill()
    if way == "gone for a while":
        for member in cluster.members:
            eventually(functools.partial(refuses, member, session), LONG)
    cluster.redis.start()


WAYS = pytest.mark.parametrize("way", ["restarted", "gone for a while"])

SPAN = r"""
import time
began = time.monotonic()
UNTIL
with open("ran", "a") as file: file.write(f"TOKEN {began} {time.monotonic()}\n")
"""


def span(token: str, wait: str = "") -> str:
    return SPAN.replace("UNTIL", wait).replace("TOKEN", token)


@WAYS
def test_running_and_queued_executions_finish_once_and_one_at_a_time(
    cluster: Cluster, way: str
) -> None:
    a, b = cluster.apis
    mine, theirs, other = (str(a.create()["id"]) for _ in range(3))
    all_of_them: dict[str, list[str]] = {mine: [], theirs: []}
    for session, first, second in ((mine, a, b), (theirs, b, a)):
        runs = first.submit(session, span("first", until("go")), timeout=600)
        running(first, runs)
        all_of_them[session] = [
            runs,
            first.submit(session, span("here")),
            second.submit(session, span("there")),
            second.submit(session, span("there too")),
        ]
    outage(cluster, way, other)
    for session in (mine, theirs):
        # Whichever replica owns it now, it was started and has not ended.
        eventually(functools.partial(put, a, session, "go"), LONG)
    for session, submitted in all_of_them.items():
        for api, execution_id in itertools.product((a, b), submitted):
            assert result_of(api, execution_id)["status"] == "success"
        found = [line.rsplit(" ", 2) for line in lines(a, session)]
        assert sorted(token for token, _, _ in found) == ["first", "here", "there", "there too"]
        for before, after in itertools.pairwise(found):
            assert float(before[2]) <= float(after[1]), f"{before} and {after} overlap"
    for session in (mine, theirs, other):
        b.end(session)


def put(api: Api, session: str, name: str) -> bool:
    response = api.http.put(f"{V1}/sessions/{session}/files/{name}", content=b"")
    return response.status_code == 201


@WAYS
def test_executions_that_finish_while_redis_is_unavailable_are_not_lost(
    cluster: Cluster, way: str
) -> None:
    a, b = cluster.apis
    session, other = (str(a.create()["id"]) for _ in range(2))
    runs = a.submit(session, note("first") + until("go") + "print('over')", timeout=600)
    running(a, runs)
    waits = b.submit(session, note("second"))
    cluster.redis.kill()
    if way == "gone for a while":
        eventually(functools.partial(refuses, cluster[0], other), LONG)
    a.put(session, "go")
    with ThreadPoolExecutor(3) as threads:
        # A request during the outage gets an error or the result.
        asked = [threads.submit(settled, api, runs) for api in (a, b)]
        reported = threads.submit(last_event, cluster[1], runs)
        cluster.redis.start()
        results = [future.result() for future in asked]
        assert results[0] == results[1]
        assert results[0]["stdout"] == "over\n"
        assert reported.result() == results[0]

    assert result_of(a, waits)["status"] == "success"
    assert lines(a, session) == ["first", "second"]
    for one in (session, other):
        a.end(one)


def settled(api: Api, execution_id: str) -> dict[str, object]:
    """The result, requested repeatedly until it exists."""
    found: list[dict[str, object]] = []

    def finished() -> bool:
        response = api.http.get(f"{V1}/executions/{execution_id}/result?wait=5")
        if response.status_code == 503:
            problem(response, *AWAY)
        elif response.status_code == 409:
            problem(response, 409, "execution_not_finished")
        else:
            found.append(answer(response))
        return bool(found)

    eventually(finished, LONG)
    return found[0]


def last_event(member: Member, execution_id: str) -> object:
    """The last event, listened for from the time of the outage on."""
    with member.calling() as api:
        events = list(api.events(execution_id))
    assert events[-1][1] == "result"
    return events[-1][2]


def test_requests_during_the_outage_are_refused_or_handled_once(cluster: Cluster) -> None:
    sessions = [str(cluster[0].api.create()["id"]) for _ in range(3)]
    stop = False

    def drive(number: int) -> tuple[list[tuple[str, str, str]], int]:
        accepted: list[tuple[str, str, str]] = []
        refused = 0
        with cluster[number % 2].calling() as api:
            for count in itertools.count():
                if stop:
                    return accepted, refused
                session, token = sessions[count % len(sessions)], f"{number}-{count}"
                response = api.execute(session, code=note(token), wait=0.3)
                if response.status_code == 503:
                    problem(response, *AWAY)
                    refused += 1
                else:
                    assert response.status_code in (200, 202), response.text
                    accepted.append((session, token, response.json()["execution_id"]))
        raise AssertionError

    with ThreadPoolExecutor(4) as threads:
        driven = [threads.submit(drive, number) for number in range(4)]
        try:
            for way in ("restarted", "gone for a while", "restarted"):
                outage(cluster, way, sessions[0])
                recovered(cluster)
        finally:
            stop = True
        done = [future.result() for future in driven]
    accepted = [item for taken, _ in done for item in taken]
    assert all(taken for taken, _ in done)
    assert any(refused for _, refused in done)
    for _, _, execution_id in accepted:
        for api in cluster.apis:
            assert result_of(api, execution_id)["status"] == "success"
    for session in sessions:
        ran = lines(cluster[0].api, session)
        assert sorted(ran) == sorted(token for where, token, _ in accepted if where == session)
        cluster[1].api.end(session)


def test_instances_not_cleared_before_are_removed_with_the_last_server(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Cluster(tmp_path) as cluster:
        sessions = [cluster[number].api.create()["id"] for number in (0, 1)]
        cluster.redis.kill()
        for session in sessions:
            cluster[0].api.end(session)
        for member in cluster.members:
            member.kill()
        held = cluster.rows("SELECT workspace FROM sessions WHERE workspace IS NOT NULL")
        assert cluster.workspaces() >= {json.loads(row["workspace"]) for row in held}
        assert len(held) == len(sessions)
        # As if it had failed often: it would be tried again much later.
        later = "UPDATE sessions SET retry_at = 4e15, unsettled_at = 4e15, failures = 9"
        with closing(sqlite3.connect(cluster.data_dir / "atoll.db")) as database, database:
            database.execute(later)
        cluster.redis.start()
        # It checks for leftovers: see `Cluster.end`.
