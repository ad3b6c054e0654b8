"""How many executions of a session run concurrently, in what order, and when one is refused."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem, until
from tests.harness import Server

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.quick

ENTERS = """
import os, time
open(f"in.{name}", "w").close()
most = 0
for _ in range(20):
    most = max(most, sum(n.startswith("in.") for n in os.listdir()))
    time.sleep(0.002)
print(most)
os.unlink(f"in.{name}")
"""
"""Counts how many others run at the same time."""


def entering(name: object) -> str:
    return f"name = {str(name)!r}\n{ENTERS}"


def barrier(name: int, size: int) -> str:
    """Code that ends only when this number of executions runs concurrently."""
    return (
        f"import os, time\nopen('at.{name}', 'w').close()\n"
        f"while sum(n.startswith('at.') for n in os.listdir()) < {size}: time.sleep(0.005)\n"
    )


@pytest.mark.parametrize("capacity", [1, 3, 8])
def test_a_session_runs_exactly_as_many_executions_as_its_capacity(api: Api, capacity: int) -> None:
    session = api.create(capacity=capacity)["id"]
    together = [api.submit(session, barrier(n, capacity)) for n in range(capacity)]
    for execution_id in together:
        assert api.result(execution_id)["status"] == "success"
    many = [api.submit(session, entering(n)) for n in range(capacity * 4)]
    counts = [int(api.result(execution_id)["stdout"]) for execution_id in many]

    assert max(counts) <= capacity
    api.end(session)


def test_an_execution_beyond_the_capacity_waits(api: Api) -> None:
    session = api.create(capacity=2)["id"]
    first = [api.submit(session, until(f"go{n}")) for n in range(2)]
    for execution_id in first:
        api.await_status(execution_id, "running")
    third = api.submit(session, "print(3)")
    events = api.events(third)
    assert next(events) == ("", "queued", {"ahead": 2})
    assert api.status(third) == "pending"
    # Whichever ends first makes room.
    api.put(session, "go1")
    assert api.result(third)["stdout"] == "3\n"
    assert api.status(first[0]) == "running"
    api.put(session, "go0")
    assert api.result(first[0])["status"] == "success"
    api.end(session)


def test_queued_executions_start_in_order(api: Api) -> None:
    session = api.create(capacity=2)["id"]
    holding = [api.submit(session, until(f"go{n}"), timeout=300) for n in range(2)]
    waiting = [api.submit(session, f"print({n})") for n in range(10)]
    # One slot for all: of two that start together, either may be the first.
    api.put(session, "go0")
    for execution_id in waiting:
        assert api.result(execution_id)["status"] == "success"
    assert api.status(holding[1]) == "running"
    api.put(session, "go1")
    for execution_id in holding:
        assert api.result(execution_id)["status"] == "success"

    begun = [api.execution(execution_id)["started_at"] for execution_id in waiting]
    assert begun == sorted(begun)
    api.end(session)


def test_an_execution_that_fails_times_out_or_is_cancelled_frees_its_slot(api: Api) -> None:
    session = api.create(capacity=2)["id"]
    for _ in range(3):
        api.run(session, "1/0")
        api.run(session, "while True: pass", timeout=0.1)
        cancelled = api.submit(session, until("never"))
        answer(api.http.post(f"{V1}/executions/{cancelled}/cancel"))
        waiting = [api.submit(session, until("never")) for _ in range(3)]
        for execution_id in reversed(waiting):
            answer(api.http.post(f"{V1}/executions/{execution_id}/cancel"))
    together = [api.submit(session, barrier(n, 2)) for n in range(2)]

    assert [api.result(each)["status"] for each in together] == ["success"] * 2
    api.end(session)


@pytest.mark.slow
def test_a_full_queue_refuses_executions_with_retry_after(bubblewrap: str, tmp_path: Path) -> None:
    with Server(tmp_path, ATOLL_EXECUTION__QUEUE_LIMIT="3") as server, server.client() as http:
        api = Api(http)
        session = str(api.create(capacity=2)["id"])
        running = [api.submit(session, until("go")) for _ in range(2)]
        for execution_id in running:
            api.await_status(execution_id, "running")

        def one_more(_: int) -> Any:
            with server.client() as mine:
                body = {"session_id": session, "code": "print(1)", "mode": "async"}
                return mine.post(f"{V1}/invocations", json=body)

        with ThreadPoolExecutor(8) as threads:
            responses = list(threads.map(one_more, range(8)))
        accepted = [response for response in responses if response.status_code == 202]
        refused = [response for response in responses if response.status_code != 202]
        assert len(accepted) == 3
        for response in refused:
            problem(response, 429, "session_busy")
            assert re.fullmatch(r"[1-9]\d*", response.headers["retry-after"])
        # A refused request has left nothing behind.
        listed = answer(api.http.get(f"{V1}/invocations?session_id={session}"))["items"]
        assert len(listed) == 5
        # An id that is known needs no room.
        known = {"execution_id": running[0], "code": until("go")}
        assert answer(api.execute(session, **known), 202)["execution_id"] == running[0]
        api.put(session, "go")
        for response in accepted:
            assert api.result(response.json()["execution_id"])["stdout"] == "1\n"
        assert api.run(session, "print(2)")["stdout"] == "2\n"


@pytest.mark.parametrize("capacity", [0, -1, 65, 10**10, 1.5, "many", None], ids=str)
def test_an_invalid_capacity_is_refused(api: Api, capacity: Any) -> None:
    refused = problem(
        api.http.post(f"{V1}/sessions", json={"capacity": capacity}), 422, "invalid_request"
    )
    assert "capacity" in (refused.get("field"), *(e["field"] for e in refused.get("errors", [])))


def test_a_session_reports_its_capacity(api: Api, session: str) -> None:
    assert api.get(session)["capacity"] == 1
    made = api.create(capacity=64)
    assert (made["capacity"], api.get(made["id"])["capacity"]) == (64, 64)
    api.end(made["id"])


def test_a_replaced_instance_keeps_the_capacity_of_its_session(api: Api) -> None:
    session = api.create(capacity=2)["id"]
    eventually(lambda: api.get(session)["status"] == "running")
    for turn in range(2):
        together = [api.submit(session, barrier(turn * 2 + n, turn * 2 + 2)) for n in range(2)]
        assert [api.result(each)["status"] for each in together] == ["success"] * 2
        api.run(session, "import os\n[os.kill(p, 9) for p in (1, -1)]")
    api.end(session)
