"""
Sends responses no faster than clients read them.

A large body is sent in pieces, each after the client has read the previous ones, and counts towards
`ResponseMemory` until then. If there is no room, a read is refused with `too_many_large_answers`,
and an event stream ends: its client resumes after the last id. A route that has run something
offers a short response, which is sent instead of the result. Other responses to requests that have
changed something wait for room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.api.rest.middleware.bodies import SAFE_METHODS
from atoll.api.rest.middleware.client_limits import key_of, out_of_memory
from atoll.api.rest.problems import problem
from atoll.api.rest.responses import JsonResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from atoll.api.rest.middleware.client_limits import Reservation, ResponseMemory

EVENT_STREAM = b"text/event-stream"
PIECE = 64 * 1024
"""Bytes that are written at once."""
MAX_ESCAPED = 6
"""Most bytes that JSON makes of one byte of output."""
_PACED = "atoll.paced"


def may_be_large(size: int) -> bool:
    """Whether a response with `size` bytes of output may need room in `ResponseMemory`."""
    return size * MAX_ESCAPED > PIECE // 2


def offer_short_response(scope: Scope, content: dict[str, Any], status: int) -> None:
    """Send this instead if there is no room for the response to this request."""
    paced: _PacedResponse | None = scope.get(_PACED)
    if paced is not None:
        paced.offer(JsonResponse(content, status))


class Backpressure:
    def __init__(self, app: ASGIApp, memory: ResponseMemory) -> None:
        self._app = app
        self._memory = memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        paced = scope[_PACED] = _PacedResponse(scope, receive, send, self._memory)
        await self._app(scope, receive, paced.send)


class _PacedResponse:
    def __init__(self, scope: Scope, receive: Receive, send: Send, memory: ResponseMemory) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._memory = memory
        self._start: Message | None = None
        """Not sent before it is known whether there is room for a large body."""
        self._resumable = False
        """Whether it is an event stream, which the client can resume where it ended."""
        self._short_response: JsonResponse | None = None
        self._ended = False

    def offer(self, short_response: JsonResponse) -> None:
        self._short_response = short_response

    async def send(self, message: Message) -> None:
        if self._ended:
            return
        if message["type"] == "http.response.start":
            self._resumable = _header(message, b"content-type").startswith(EVENT_STREAM)
            if int(_header(message, b"content-length") or 0) > PIECE:
                self._start = message
            else:
                await self._send(message)
            return
        body: bytes = message.get("body", b"")
        if len(body) > PIECE and self._scope["method"] != "HEAD":
            await self._send_large(body, more=message.get("more_body", False))
            return
        await self._send_start()
        await self._send(message)

    async def _send_start(self) -> None:
        start, self._start = self._start, None
        if start is not None:
            await self._send(start)

    async def _send_large(self, body: bytes, *, more: bool) -> None:
        reservation = await self._reserve(len(body))
        if reservation is None:
            self._ended = True
            if self._start is None:
                await self._send({"type": "http.response.body", "body": b""})
                return
            instead = self._short_response or problem(out_of_memory())
            await instead(self._scope, self._receive, self._send)
            return
        with reservation:
            await self._send_start()
            for start in range(0, len(body), PIECE):
                piece = body[start : start + PIECE]
                follows = more or start + PIECE < len(body)
                await self._send(
                    {"type": "http.response.body", "body": piece, "more_body": follows}
                )

    async def _reserve(self, size: int) -> Reservation | None:
        key = key_of(self._scope)
        replaceable = self._scope["method"] in SAFE_METHODS or self._short_response is not None
        if self._resumable or (replaceable and self._start is not None):
            return self._memory.try_reserve(key, size)
        return await self._memory.wait_to_reserve(key, size)


def _header(message: Message, wanted: bytes) -> bytes:
    for name, value in message.get("headers", ()):
        if name.lower() == wanted:
            return bytes(value)
    return b""
