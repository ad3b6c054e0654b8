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

from atoll.api.rest.answers import result_out

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.model.execution import Execution
    from atoll.service.story import Event

PING_SECONDS = 15.0
MEDIA_TYPE = "text/event-stream"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def answer(events: AsyncIterator[Event]) -> StreamingResponse:
    return StreamingResponse(_kept_alive(_texts(events)), media_type=MEDIA_TYPE, headers=_HEADERS)


def raw_answer(events: AsyncIterator[str]) -> StreamingResponse:
    """Of events that are written already."""
    return StreamingResponse(_kept_alive(events), media_type=MEDIA_TYPE, headers=_HEADERS)


async def _texts(events: AsyncIterator[Event]) -> AsyncIterator[str]:
    async for event in events:
        number = "" if event.number is None else f"id: {event.number}\n"
        content = json.dumps(_content(event.content))
        yield f"{number}event: {event.name}\ndata: {content}\n\n"


async def _kept_alive(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """
    A comment after a while without an event, so that nobody in between takes the line for dead.
    """
    following = asyncio.ensure_future(anext(events))
    try:
        while True:
            done, _ = await asyncio.wait([following], timeout=PING_SECONDS)
            if not done:
                yield ": ping\n\n"
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
