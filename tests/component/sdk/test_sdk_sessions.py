from __future__ import annotations

import asyncio
import json
from itertools import islice
from typing import TYPE_CHECKING
from unittest.mock import ANY

import pytest

from atoll import Conflict, ExecutionFailed, InvalidRequest, NotFound
from atoll.sdk.values import DrainInfo
from tests.component.sdk.fake_server import encoded

if TYPE_CHECKING:
    from atoll import AsyncAtoll, Atoll
    from tests.component.sdk.fake_server import FakeServer

HOLD = json.dumps({"hold": True})


def test_a_session_lives_as_long_as_its_with_block(atoll: Atoll, fake_server: FakeServer) -> None:
    with atoll.session("numpy", timeout=60, cpu=0.5, memory="1Gi", env={"A": "b"}) as session:
        assert session.info.status == "running"
    assert fake_server.bodies == [
        {
            "template_id": "numpy",
            "timeout": 60,
            "cpu": "0.5",
            "memory": "1Gi",
            "env_vars": {"A": "b"},
        }
    ]
    assert fake_server.sessions[session.id]["status"] == "terminated"


def test_an_error_in_the_block_propagates_and_the_session_ends(
    atoll: Atoll, fake_server: FakeServer
) -> None:
    with pytest.raises(ZeroDivisionError), atoll.session() as session:
        raise ZeroDivisionError
    assert fake_server.sessions[session.id]["status"] == "terminated"


def test_a_run_returns_all_fields_of_the_result(atoll: Atoll) -> None:
    with atoll.session() as session:
        result = session.run("print(42)", event={"n": 1}).check()
    assert result.ok
    assert result.stdout == "print(42)"
    assert result.return_value == {"n": 1}
    assert result.metrics is not None
    assert result.metrics.duration_ms == 1.0
    assert result.artifacts == ("out.txt",)


def test_omitted_options_are_not_sent(atoll: Atoll, fake_server: FakeServer) -> None:
    with atoll.session() as session:
        session.run(command=["ls", "-l"], cwd="sub")
        session.submit("x", language="shell", args=["a"], stdin="in", env={"K": "v"}, timeout=2)
    assert fake_server.bodies[1:] == [
        {"command": ["ls", "-l"], "cwd": "sub", "execution_id": ANY},
        {
            "code": "x",
            "language": "shell",
            "args": ["a"],
            "stdin": "in",
            "env": {"K": "v"},
            "timeout": 2,
            "execution_id": ANY,
        },
    ]


@pytest.mark.anyio
async def test_a_run_continues_to_wait_after_the_first_response(
    async_atoll: AsyncAtoll, fake_server: FakeServer
) -> None:
    async with async_atoll.session() as session:
        running = asyncio.create_task(session.run(HOLD))
        await asyncio.to_thread(fake_server.started.acquire)
        while not any(path.endswith("/result") for _, path in fake_server.requests):
            await session.refresh()
        fake_server.release()
        assert (await running).ok


@pytest.mark.anyio
@pytest.mark.parametrize("live", [False, True], ids=["silent", "with_callbacks"])
async def test_a_run_that_is_cancelled_cancels_its_execution(
    async_atoll: AsyncAtoll, fake_server: FakeServer, live: bool
) -> None:
    async with async_atoll.session() as session:
        running = asyncio.create_task(session.run(HOLD, on_stdout=print if live else None))
        await asyncio.to_thread(fake_server.started.acquire)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        (execution,) = fake_server.executions.values()
        assert execution.cancelled


def test_output_callbacks_receive_whole_characters(atoll: Atoll) -> None:
    pieces: list[tuple[str, str]] = []
    euro = "€".encode()
    script = {
        "out": [["stdout", "one\u2028"], ["stderr", "two"]],
        "raw": [["stdout", encoded(euro[:1])], ["stdout", encoded(euro[1:] + b"\xff")]],
    }
    with atoll.session() as session:
        result = session.run(
            json.dumps(script),
            on_stdout=lambda text: pieces.append(("out", text)),
            on_stderr=lambda text: pieces.append(("err", text)),
        )
    assert result.ok
    assert pieces == [("out", "one\u2028"), ("err", "two"), ("out", "€\ufffd")]


@pytest.mark.anyio
async def test_a_callback_can_be_a_coroutine_function(async_atoll: AsyncAtoll) -> None:
    pieces: list[str] = []

    async def keep(text: str) -> None:
        pieces.append(text)

    async with async_atoll.session() as session:
        await session.run("hello", on_stdout=keep)
    assert pieces == ["hello"]


def test_events_resume_after_a_lost_connection(atoll: Atoll, fake_server: FakeServer) -> None:
    script = {"out": [["stdout", "a"], ["stdout", "b"], ["stderr", "c"]]}
    with atoll.session() as session:
        execution = session.submit(json.dumps(script))
        fake_server.cut_events_after = 2
        events = list(execution.events())
    assert [event.kind for event in events] == ["started", "stdout", "stdout", "stderr", "result"]
    assert [event.sequence for event in events] == [1, 2, 3, 4, 5]
    assert [event.text for event in events[1:4]] == ["a", "b", "c"]
    assert events[-1].result is not None


def test_an_execution_can_be_followed_awaited_and_cancelled(
    atoll: Atoll, fake_server: FakeServer
) -> None:
    with atoll.session() as session:
        execution = session.submit(HOLD)
        assert execution.status().status == "running"
        with pytest.raises(Conflict) as early:
            execution.result()
        assert early.value.code == "execution_not_finished"
        with pytest.raises(TimeoutError):
            execution.wait(0)
        assert execution.cancel().ended
        result = session.execution(execution.id).wait()
        assert (result.status, result.cause) == ("error", "user")
        assert execution.info().artifacts[0].mime_type == "text/plain"


def test_lists_fetch_only_the_pages_that_are_needed(atoll: Atoll, fake_server: FakeServer) -> None:
    ids = [atoll.sessions.create().id for _ in range(5)]
    assert [session.id for session in atoll.sessions.list()] == ids
    fake_server.requests.clear()
    assert [session.id for session in islice(atoll.sessions.list(), 3)] == ids[:3]
    assert len(fake_server.requests) == 2
    session = atoll.sessions.get(ids[0])
    for _ in range(3):
        session.run("x")
    assert len(list(session.executions())) == 3
    assert atoll.sessions.delete(ids[0]).status == "terminated"
    assert [session.id for session in atoll.sessions.list(status="running")] == ids[1:]
    assert session.refresh().status == "terminated"


def test_a_failure_is_a_result_until_it_is_checked(atoll: Atoll) -> None:
    script = {
        "out": [["stderr", "line 1\nline 2\n"]],
        "result": {
            "status": "failed",
            "exit_code": 3,
            "error": {"code": "exception", "message": "boom", "name": "ValueError"},
        },
    }
    with atoll.session() as session:
        result = session.run(json.dumps(script))
    assert not result.ok
    with pytest.raises(
        ExecutionFailed, match=r"failed \(cause: exit, exit code: 3\): boom"
    ) as raised:
        result.check()
    assert raised.value.message.endswith("line 1\nline 2")
    assert raised.value.result is result


def test_a_string_is_refused_as_a_command(atoll: Atoll) -> None:
    with atoll.session() as session, pytest.raises(InvalidRequest, match="list of strings"):
        session.run(command="ls -l")


def test_an_id_never_reaches_another_resource(atoll: Atoll, fake_server: FakeServer) -> None:
    session = atoll.sessions.create()
    with pytest.raises(NotFound):
        atoll.sessions.get(f"../sessions/{session.id}")
    with pytest.raises(NotFound):
        session.files.remove(f"../../{session.id}")
    assert fake_server.sessions[session.id]["status"] == "running"


def test_an_update_keeps_the_other_options_of_a_template(
    atoll: Atoll, fake_server: FakeServer
) -> None:
    made = atoll.templates.create(
        "Science", template_id="science", preload=["numpy"], memory="1Gi", require=["seccomp"]
    )
    assert made.security_context.require == ("seccomp",)
    changed = atoll.templates.update("science", pool_size=3, pool_max=9, cpu=2)
    assert (changed.preload, changed.pool_size, changed.pool_max) == (("numpy",), 3, 9)
    assert (changed.default_resources.cpu, changed.default_resources.memory) == ("2", "1Gi")
    assert {"id", "version", "created_at", "updated_at"}.isdisjoint(fake_server.bodies[-1])
    assert [template.id for template in atoll.templates.list()] == ["science"]
    atoll.templates.delete("science")
    with pytest.raises(NotFound):
        atoll.templates.get("science")


def test_pools_show_their_size_and_limits(atoll: Atoll) -> None:
    (pool,) = atoll.pools.list()
    assert (pool.template_id, pool.ready, pool.target, pool.others) == ("python", 2, 3, 4)
    assert (pool.limited_by, pool.oldest_seconds) == ("memory_share", None)


def test_nodes_show_their_isolation(atoll: Atoll) -> None:
    (node,) = atoll.nodes.list()
    assert node.status == "healthy"
    assert atoll.nodes.health(node.id).missing == {"disk_quota": "no loop devices"}
    assert atoll.nodes.metrics(node.id).pool == {"python": 2}
    assert atoll.nodes.get(node.id).labels == {"zone": "a"}


def test_a_drain_is_followed(atoll: Atoll, fake_server: FakeServer) -> None:
    assert atoll.nodes.cordon("local").cordoned
    assert atoll.nodes.drain("local").drain == DrainInfo(2, 2)
    drains = [node.drain for node in atoll.nodes.follow_drain("local")]
    assert drains == [DrainInfo(2, 1), DrainInfo(2, 0)]
    assert atoll.nodes.uncordon("local").drain is None
    assert [node.drain for node in atoll.nodes.follow_drain("local")] == [None]
    atoll.nodes.delete("local")
    assert fake_server.removed_nodes == ["local"]
