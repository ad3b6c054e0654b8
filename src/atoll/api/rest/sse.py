"""
Responses that are streams of server-sent events.

An event is taken from its source when the client has read the previous one, so nothing is queued
for a slow client.
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

PING_INTERVAL = 15.0
"""Seconds without an event after which a comment is sent."""
MEDIA_TYPE = "text/event-stream"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def event_stream(
    events: AsyncIterator[StreamEvent], *reservations: Reservation
) -> StreamingResponse:
    """The reservations are given back when the stream ends."""
    return _EventStream(_encode_events(events), reservations)


def encoded_stream(events: AsyncIterator[str], *reservations: Reservation) -> StreamingResponse:
    """A stream of events that are encoded already."""
    return _EventStream(_encode_texts(events), reservations)


class _EventStream(StreamingResponse):
    def __init__(self, events: AsyncIterator[bytes], reservations: tuple[Reservation, ...]) -> None:
        super().__init__(_with_pings(events), media_type=MEDIA_TYPE, headers=_HEADERS)
        self._reservations = reservations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            for reservation in self._reservations:
                reservation.close()


async def _encode_texts(texts: AsyncIterator[str]) -> AsyncIterator[bytes]:
    async for text in texts:
        yield text.encode()


async def _encode_events(events: AsyncIterator[StreamEvent]) -> AsyncIterator[bytes]:
    async for event in events:
        yield _encode(event)


def _encode(event: StreamEvent) -> bytes:
    """A function of its own, so that a stalled stream references the bytes and not the event."""
    number = "" if event.number is None else f"id: {event.number}\n"
    content = json.dumps(_content(event.content)).encode("ascii")
    return b"%sevent: %s\ndata: %s\n\n" % (number.encode(), event.name.encode(), content)


async def _with_pings(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Adds comments while there are no events, so that no proxy closes an idle connection."""
    following = asyncio.ensure_future(anext(events))
    try:
        while True:
            done, _ = await asyncio.wait([following], timeout=PING_INTERVAL)
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
