"""Events on the wire: what they look like, and that silence is told too."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from atoll.api.rest import sse
from atoll.model.stream_event import StreamEvent

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio


async def written(events: AsyncIterator[StreamEvent]) -> str:
    pieces: list[Any] = [piece async for piece in sse.answer(events).body_iterator]
    return b"".join(pieces).decode()


async def test_an_event_has_a_number_a_name_and_one_line_of_content() -> None:
    async def events() -> AsyncIterator[StreamEvent]:
        yield StreamEvent(None, "queued", {"ahead": 2})
        yield StreamEvent(7, "stdout", b"a\r\nb\n\ndata: x")
        yield StreamEvent(8, "stderr", b"\xff")

    assert await written(events()) == (
        'event: queued\ndata: {"ahead": 2}\n\n'
        'id: 7\nevent: stdout\ndata: {"text": "a\\r\\nb\\n\\ndata: x"}\n\n'
        'id: 8\nevent: stderr\ndata: {"base64": "/w=="}\n\n'
    )


async def test_silence_is_told_by_a_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_SECONDS", 0.01)
    more = asyncio.Event()

    async def events() -> AsyncIterator[StreamEvent]:
        yield StreamEvent(1, "started", {})
        await more.wait()
        yield StreamEvent(2, "stdout", b"x")

    body = aiter(sse.answer(events()).body_iterator)
    assert "started" in str(await anext(body))
    assert [await anext(body) for _ in range(3)] == [b": ping\n\n"] * 3
    more.set()
    # Nothing was lost while it was silent.
    rest = [piece async for piece in body if piece != b": ping\n\n"]
    assert rest == [b'id: 2\nevent: stdout\ndata: {"text": "x"}\n\n']


async def test_who_leaves_ends_what_it_listened_to() -> None:
    heard, left = asyncio.Event(), asyncio.Event()

    async def events() -> AsyncIterator[StreamEvent]:
        try:
            yield StreamEvent(1, "started", {})
            await asyncio.Event().wait()
        finally:
            left.set()

    async def listen() -> None:
        async for _ in sse.answer(events()).body_iterator:
            heard.set()

    task = asyncio.ensure_future(listen())
    await heard.wait()
    task.cancel()
    await asyncio.wait([task])
    async with asyncio.timeout(60):
        await left.wait()


async def test_a_defect_in_the_middle_cuts_the_stream() -> None:
    async def events() -> AsyncIterator[StreamEvent]:
        yield StreamEvent(1, "started", {})
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await written(events())
