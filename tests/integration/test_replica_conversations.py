"""Events, capacity, questions and injections, whichever replica one speaks to."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem, until
from tests.e2e.test_capacity import entering
from tests.e2e.test_conversations import ASK, approval, inject, resume, waits
from tests.e2e.test_events import STEPWISE, all_of, check_resumed, go, listen_until
from tests.integration.replicas import LONG, Cluster, concurrently, result_of, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx


@pytest.fixture(scope="module")
def shared(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("replicas"), size=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Cluster:
    """Two members, whose death the next test does not notice."""
    return shared.start()


@pytest.fixture
def session(cluster: Cluster) -> Iterator[str]:
    session_id = str(cluster[0].api.create(timeout=600)["id"])
    yield session_id
    cluster.start()[0].api.end(session_id)


def invoke(api: Api, session: str, **fields: Any) -> httpx.Response:
    return api.http.post(f"{V1}/invocations", json={"session_id": session, **fields})


# Events


def test_a_stream_is_resumed_at_replica_after_replica_and_misses_nothing(
    cluster: Cluster, session: str
) -> None:
    a, b = cluster.apis
    execution_id = a.submit(session, STEPWISE.format(steps=4), timeout=300)
    received: list[Any] = []
    for step, api in enumerate((a, b, a, b)):
        go(a, session, range(step, step + 1))
        received += listen_until(
            api, execution_id, f"err {step}", received[-1][0] if received else None
        )
    received += all_of(b, execution_id, received[-1][0])

    assert received[-1][1] == "result"
    for api in (a, b):
        check_resumed(api, execution_id, received)


def test_event_numbers_survive_a_kill_of_the_replica(cluster: Cluster, session: str) -> None:
    a, b = cluster.apis
    execution_id = a.submit(session, STEPWISE.format(steps=4), timeout=300)
    go(a, session, range(2))
    events = listen_until(a, execution_id, "err 1")
    assert listen_until(b, execution_id, "err 1") == events
    cluster[0].kill()
    go(b, session, range(2, 4))
    rest = all_of(b, execution_id, events[-1][0])

    assert [name for _, name, _ in rest][-1] == "result"
    text = "".join(data["text"] for _, name, data in events + rest if name == "stdout")
    assert text == "".join(f"out {step}\n" for step in range(4))
    check_resumed(b, execution_id, events + rest)
    check_resumed(cluster.start()[0].api, execution_id, events + rest)


def test_a_retry_is_streamed_through_another_replica(cluster: Cluster, session: str) -> None:
    a, b = cluster.apis
    code = (
        "import os, time\nopen('ran', 'a').write('x')\nprint('begun', flush=True)\n"
        "while len(open('ran').read()) < 2: time.sleep(0.01)\nprint('over')"
    )
    execution_id = a.submit(session, code, timeout=300)
    with ThreadPoolExecutor(1) as threads, cluster[1].calling() as listener:
        waiting = threads.submit(all_of, listener, execution_id)
        listen_until(b, execution_id, "begun")
        cluster.kill_instance(a.get(session)["container_id"])
        result = waiting.result()

    numbers = [int(number) for number, _, _ in result]
    assert numbers == sorted(set(numbers))
    names = [name for _, name, _ in result]
    assert names[names.index("retry") + 1] == "started"
    assert names[-1] == "result"
    assert "over\n" in [data.get("text", "")[-5:] for _, _, data in result]


# Capacity


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_the_capacity_of_a_session_is_enforced_across_replicas(
    cluster: Cluster, capacity: int
) -> None:
    a, b = cluster.apis
    session = a.create(capacity=capacity, timeout=600)["id"]
    turns = itertools.cycle((a, b))
    many = [next(turns).submit(session, entering(n), timeout=300) for n in range(12)]
    counts = [int(result_of(b, execution_id)["stdout"]) for execution_id in many]

    assert max(counts) <= capacity
    a.end(session)


def test_a_replica_uses_the_slots_that_another_leaves_free(cluster: Cluster) -> None:
    a, b = cluster.apis
    session = a.create(capacity=2, timeout=600)["id"]
    first = a.submit(session, until("go"), timeout=300)
    running(a, first)
    assert b.run(session, "print('beside')")["stdout"] == "beside\n"
    assert a.status(first) == "running"
    a.put(session, "go")
    assert result_of(a, first)["status"] == "success"
    a.end(session)


# Ids of one's own


def test_the_same_id_at_both_replicas_is_one_run(cluster: Cluster, session: str) -> None:
    code = "with open('ran', 'a') as file: file.write('.')"
    for turn in range(5):
        fields = {"code": code, "invocation_id": f"turn-{session}-{turn}"}

        def call(number: int, fields: dict[str, str] = fields) -> dict[str, Any]:
            with cluster[number % 2].calling() as api:
                return answer(invoke(api, session, **fields))

        with ThreadPoolExecutor(8) as threads:
            responses = list(threads.map(call, range(8)))
        assert all(one == responses[0] for one in responses)
        ran = cluster[0].api.http.get(f"{V1}/sessions/{session}/files/ran").content
        assert len(ran) == turn + 1


# Conversations


def test_a_question_is_answered_through_another_replica(cluster: Cluster, session: str) -> None:
    a, b = cluster.apis
    execution_id = a.submit(session, ASK, timeout=300)
    waits(b, execution_id)
    assert approval(a, execution_id) == approval(b, execution_id)
    answer(resume(b, execution_id, approved=True, answer="from b"))

    assert result_of(b, execution_id)["stdout"] == "True from b None\n"


def test_only_one_of_two_answers_through_two_replicas_counts(
    cluster: Cluster, session: str
) -> None:
    a, b = cluster.apis
    execution_id = a.submit(session, ASK + "\n" + until("go"), timeout=300)
    waits(b, execution_id)
    first, second = concurrently(
        lambda: resume(a, execution_id, approved=True, answer="a"),
        lambda: resume(b, execution_id, approved=True, answer="b"),
    )
    assert sorted((first.status_code, second.status_code)) == [200, 409]
    problem(first if first.status_code == 409 else second, 409, "already_answered")
    a.put(session, "go")

    accepted = "a" if first.status_code == 200 else "b"
    assert result_of(a, execution_id)["stdout"] == f"True {accepted} None\n"


def test_a_question_of_a_lost_replica_can_be_answered(cluster: Cluster, session: str) -> None:
    a, b = cluster.apis
    execution_id = a.submit(session, ASK, timeout=300)
    waits(a, execution_id)
    cluster[0].kill()
    # Once the other has taken it over.
    eventually(lambda: resume(b, execution_id, approved=True, answer=1).status_code == 200, LONG)

    assert result_of(b, execution_id)["stdout"] == "True 1 None\n"


def test_a_replica_that_shuts_down_hands_over_its_questions(cluster: Cluster, session: str) -> None:
    a, b = cluster.apis
    execution_id = a.submit(session, ASK, timeout=300)
    waits(a, execution_id)
    assert cluster[0].stop() == 0
    eventually(lambda: resume(b, execution_id, approved=True, answer=1).status_code == 200, LONG)

    assert result_of(b, execution_id)["stdout"] == "True 1 None\n"


def test_stdin_and_messages_go_through_another_replica(cluster: Cluster, session: str) -> None:
    a, b = cluster.apis
    code = (
        "import sys\nfrom atoll_session import messages\nprint(sys.stdin.readline())\n"
        "print(messages(60))"
    )
    execution_id = a.submit(session, code, stdin_open=True, timeout=300)
    running(a, execution_id)
    answer(inject(b, execution_id, stdin="typed\n"))
    answer(inject(b, execution_id, message="told"))

    assert result_of(b, execution_id)["stdout"] == "typed\n\n['told']\n"
    assert (
        problem(inject(b, execution_id, message="x"), 409, "execution_not_running")["status_now"]
        == "completed"
    )


def test_the_reason_of_a_cancellation_is_forwarded_to_another_replica(
    cluster: Cluster, session: str
) -> None:
    a, b = cluster.apis
    response = answer(
        invoke(a, session, code=until("never"), mode="async", timeout_ms=300_000), 202
    )
    running(a, response["execution_id"])
    url = f"{V1}/invocations/{response['invocation_id']}/cancel"
    assert answer(b.http.post(url, json={"reason": "why"}))["status"] == "cancelled"

    error = result_of(a, response["execution_id"])["error"]
    assert error == {"code": "cancelled", "message": "The execution was cancelled: why"}
