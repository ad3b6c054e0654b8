from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from starlette.responses import StreamingResponse

from atoll.errors import TemporaryError
from atoll.sdk.connection import ServerUnreachable
from atoll.sdk.embedded import EmbeddedServer
from atoll.sdk.in_process_connection import InProcessConnection
from tests.component.sdk.fake_server import FakeServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from atoll.sdk.connection import Response
    from atoll.sdk.in_process_connection import ASGIApp

pytestmark = pytest.mark.anyio

START = {"type": "http.response.start", "status": 200, "headers": []}


class Client:
    def __init__(self, app: ASGIApp) -> None:
        self._connection = InProcessConnection(app, "the server")

    def stream(
        self, method: str = "GET", target: str = "", content: Any = None, timeout: float = 60
    ) -> AbstractAsyncContextManager[Response]:
        return self._connection.stream(method, target, content=content, headers={}, timeout=timeout)

    async def request(
        self, method: str = "GET", target: str = "", content: Any = None, timeout: float = 60
    ) -> tuple[int, bytes]:
        async with self.stream(method, target, content, timeout) as response:
            return response.status_code, await response.aread()


@asynccontextmanager
async def client(app: ASGIApp) -> AsyncIterator[Client]:
    http = Client(app)
    yield http
    await http._connection.close()


async def test_a_response_is_read_while_it_is_written() -> None:
    turns: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send(START)
        for number in range(3):
            turns.append(f"wrote {number}")
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
        await send({"type": "http.response.body"})

    async with client(app) as http, http.stream() as response:
        async for chunk in response.aiter_raw():
            turns += [f"read {chunk.decode()}"]
    assert turns.index("read 0") < turns.index("wrote 2")
    assert [turn for turn in turns if turn.startswith("read")] == ["read 0", "read 1", "read 2"]


async def test_a_request_body_is_read_on_demand() -> None:
    made: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        for number in range(1000):
            made.append(number)
            yield b"x"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"x"
        await send({**START, "status": 413})
        await send({"type": "http.response.body", "body": b"enough"})

    async with client(app) as http:
        assert await http.request("POST", content=body()) == (413, b"enough")
    assert len(made) < 3


async def test_an_early_close_is_a_disconnect() -> None:
    gone = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert not (await receive())["more_body"]
        await send(START)
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"more", "more_body": True})
        gone.set()

    async with client(app) as http:
        async with http.stream() as response:
            assert await anext(response.aiter_raw()) == b"first"
        await gone.wait()


async def test_closing_releases_a_waiting_writer() -> None:
    ended = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1024

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await StreamingResponse(endless())(scope, receive, send)
        finally:
            ended.set()

    async with client(app) as http:
        async with http.stream() as response:
            await anext(response.aiter_raw())
        await ended.wait()


async def test_a_cancelled_request_is_a_disconnect_and_closing_ends_the_rest() -> None:
    asked, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        try:
            await receive()
            asked.set()
            assert (await receive())["type"] == "http.disconnect"
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with client(app) as http:
        request = asyncio.create_task(http.request())
        await asked.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert not ended.is_set()
    assert ended.is_set()


@pytest.mark.parametrize("started", [False, True], ids=["before_the_answer", "amid_the_body"])
async def test_an_application_that_fails_is_a_lost_connection(started: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if started:
            await send(START)
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
        raise ZeroDivisionError

    async with client(app) as http:
        with pytest.raises(ServerUnreachable) as raised:
            await http.request()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


async def test_an_error_after_a_complete_response_is_ignored() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**START, "status": 500})
        await send({"type": "http.response.body", "body": b"problem"})
        raise ZeroDivisionError

    async with client(app) as http:
        assert await http.request() == (500, b"problem")


async def test_an_application_that_never_responds_causes_a_timeout() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await receive()

    async with client(app) as http:
        with pytest.raises(TemporaryError) as raised:
            await http.request(timeout=0.01)
    assert raised.value.code == "server_timeout"


async def test_all_requests_work_in_process() -> None:
    fake_server = FakeServer(key=None)
    async with client(fake_server) as http:
        _, session = await http.request("POST", "sessions", b"{}")
        target = f"sessions/{json.loads(session)['id']}/files/a%20b"
        status, _ = await http.request("PUT", target, b"data")
        assert status == 201
        assert await http.request("GET", target) == (200, b"data")
        assert fake_server.files == {"a b": b"data"}


async def test_the_application_is_opened_and_closed_by_one_task() -> None:
    tasks: list[asyncio.Task[Any] | None] = []

    @asynccontextmanager
    async def application() -> AsyncIterator[ASGIApp]:
        tasks.append(asyncio.current_task())
        async with asyncio.TaskGroup():
            yield FakeServer()
        tasks.append(asyncio.current_task())

    host = EmbeddedServer(application())
    await asyncio.create_task(host.start())
    await asyncio.create_task(host.stop())
    assert len(tasks) == 2
    assert tasks[0] is tasks[1]


async def test_the_error_of_a_failed_start_propagates() -> None:
    @asynccontextmanager
    async def application() -> AsyncIterator[ASGIApp]:
        raise PermissionError("not yours")
        yield FakeServer()

    with pytest.raises(PermissionError, match="not yours"):
        await EmbeddedServer(application()).start()
