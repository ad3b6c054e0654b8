"""Server-sent events: their encoding, and comments between them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from atoll.api.rest import sse
from atoll.model.stream_event import StreamEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio


async def encoded(events: AsyncIterator[StreamEvent]) -> str:
    pieces: list[Any] = [piece async for piece in sse.event_stream(events).body_iterator]
    return b"".join(pieces).decode()


async def test_an_event_has_a_number_a_name_and_one_line_of_content() -> None:
    async def events() -> AsyncIterator[StreamEvent]:
        yield StreamEvent(None, "queued", {"ahead": 2})
        yield StreamEvent(7, "stdout", b"a\r\nb\n\ndata: x")
        yield StreamEvent(8, "stderr", b"\xff")

    assert await encoded(events()) == (
        'event: queued\ndata: {"ahead": 2}\n\n'
        'id: 7\nevent: stdout\ndata: {"text": "a\\r\\nb\\n\\ndata: x"}\n\n'
        'id: 8\nevent: stderr\ndata: {"base64": "/w=="}\n\n'
    )


async def test_a_comment_is_sent_while_there_are_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_INTERVAL", 0.01)
    more = asyncio.Event()

    async def events() -> AsyncIterator[StreamEvent]:
        yield StreamEvent(1, "started", {})
        await more.wait()
        yield StreamEvent(2, "stdout", b"x")

    body = aiter(sse.event_stream(events()).body_iterator)
    assert "started" in str(await anext(body))
    assert [await anext(body) for _ in range(3)] == [b": ping\n\n"] * 3
    more.set()
    # No event was lost in between.
    rest = [piece async for piece in body if piece != b": ping\n\n"]
    assert rest == [b'id: 2\nevent: stdout\ndata: {"text": "x"}\n\n']


async def test_a_client_that_disconnects_ends_the_source_of_events() -> None:
    received, closed = asyncio.Event(), asyncio.Event()

    async def events() -> AsyncIterator[StreamEvent]:
        try:
            yield StreamEvent(1, "started", {})
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def listen() -> None:
        async for _ in sse.event_stream(events()).body_iterator:
            received.set()

    task = asyncio.ensure_future(listen())
    await received.wait()
    task.cancel()
    await asyncio.wait([task])
    async with asyncio.timeout(60):
        await closed.wait()


async def test_an_error_of_the_source_breaks_the_stream() -> None:
    async def events() -> AsyncIterator[StreamEvent]:
        yield StreamEvent(1, "started", {})
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await encoded(events())
