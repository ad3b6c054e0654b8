"""
Server-sent events, of an execution above all.

Written as fast as the reader takes them: nothing is queued for a slow one, which reads from what is
kept of the execution anyway.
"""

from __future__ import annotations

import asyncio
import base64
import json
from typing import TYPE_CHECKING, Any

from starlette.responses import StreamingResponse

from atoll.api.rest.schemas.executions import result_out

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

    from atoll.api.rest.middleware.client_limits import Reservation
    from atoll.model.execution import Execution
    from atoll.model.stream_event import StreamEvent

PING_SECONDS = 15.0
MEDIA_TYPE = "text/event-stream"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def answer(events: AsyncIterator[StreamEvent], *held: Reservation) -> StreamingResponse:
    """The events as they come; at the end, what is held for the stream is given back."""
    return _Stream(_texts(events), held)


def raw_answer(events: AsyncIterator[str], *held: Reservation) -> StreamingResponse:
    """Of events that are written already."""
    return _Stream(_encoded(events), held)


class _Stream(StreamingResponse):
    def __init__(self, texts: AsyncIterator[bytes], held: tuple[Reservation, ...]) -> None:
        super().__init__(_kept_alive(texts), media_type=MEDIA_TYPE, headers=_HEADERS)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for one in self._held:
                one.close()


async def _encoded(texts: AsyncIterator[str]) -> AsyncIterator[bytes]:
    async for text in texts:
        yield text.encode()


async def _texts(events: AsyncIterator[StreamEvent]) -> AsyncIterator[bytes]:
    async for event in events:
        yield _text(event)


def _text(event: StreamEvent) -> bytes:
    """Its own function: a stream whose client does not read holds the event's bytes alone."""
    number = "" if event.number is None else f"id: {event.number}\n"
    content = json.dumps(_content(event.content)).encode("ascii")
    return b"%sevent: %s\ndata: %s\n\n" % (number.encode(), event.name.encode(), content)


async def _kept_alive(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """
    A comment after a while without an event, so that nobody in between takes the line for dead.
    """
    following = asyncio.ensure_future(anext(events))
    try:
        while True:
            done, _ = await asyncio.wait([following], timeout=PING_SECONDS)
            if not done:
                yield b": ping\n\n"
                continue
            try:
                text = following.result()
            except StopAsyncIteration:
                return
            yield text
            following = asyncio.ensure_future(anext(events))
    finally:
        following.cancel()


def _content(content: bytes | dict[str, Any] | Execution) -> dict[str, Any]:
    if isinstance(content, dict):
        return content
    if not isinstance(content, bytes):
        assert content.outcome is not None
        return result_out(content, content.outcome)
    try:
        return {"text": content.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}
