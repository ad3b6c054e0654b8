"""
The request body and the response of a request that is served once: the body is hashed while it is
read, the response is kept back until it is complete. Both take little memory, whatever their size.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Message, Receive, Scope, Send

SMALL = 64 * 1024
"""Bytes of a body that are read before the request is served."""
MAX_BUFFERED = 8 * 1024 * 1024
"""Bytes of a response; a larger one is sent while it is produced."""
_HASH_IN_THREAD = 512 * 1024
"""Bytes whose hash is worth a thread."""
_SEPARATOR = b"\0"


class HashedRequestBody:
    """A body that the application may read to its end or not at all."""

    def __init__(self, scope: Scope, receive: Receive, key: bytes) -> None:
        self._receive = receive
        self._first: Message | None = None
        self._digest = hashlib.sha256()
        # With the client's key, which is not stored: otherwise a reader of the fingerprint could
        # guess secrets in the body.
        for part in (key, scope["method"].encode(), scope["path"].encode(), scope["query_string"]):
            self._digest.update(part + _SEPARATOR)
        self.complete = False
        self.aborted = False
        """The client disconnected before the body was complete."""

    @property
    def fingerprint(self) -> str | None:
        """A digest of key, method, path, query and body; None before the body is complete."""
        return self._digest.hexdigest() if self.complete else None

    async def begin(self) -> None:
        """Read a small body to its end, and the beginning of a large one."""
        start = bytearray()
        while not self.complete and not self.aborted and len(start) <= SMALL:
            start += (await self._next()).get("body", b"")
        more = not self.complete
        self._first = {"type": "http.request", "body": bytes(start), "more_body": more}

    async def receive(self) -> Message:
        first, self._first = self._first, None
        return await self._next() if first is None else first

    async def drain(self) -> None:
        """Read the rest, only to hash it."""
        while not self.complete and not self.aborted:
            await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.aborted = not self.complete
            return message
        piece: bytes = message.get("body", b"")
        if len(piece) > _HASH_IN_THREAD:
            await asyncio.to_thread(self._digest.update, piece)
        else:
            self._digest.update(piece)
        self.complete = not message.get("more_body", False)
        return message


class BufferedResponse:
    """
    A response that is sent by `deliver`. One that is too large to buffer, or an event stream, which
    has no end to wait for, is sent while it is produced.
    """

    def __init__(self, send: Send, on_stream: Callable[[], Awaitable[None]]) -> None:
        self._send = send
        self._on_stream = on_stream
        """Called before the first event of an event stream is sent."""
        self._start: Message | None = None
        self._ended = False
        self._sent = False
        self.complete = False
        """Whether all of it is buffered."""
        self.body = bytearray()

    @property
    def status(self) -> int | None:
        status: int | None = None if self._start is None else self._start["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        """By name in lower case; the last one of several with the same name."""
        raw = () if self._start is None else self._start.get("headers", ())
        return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in raw}

    async def send(self, message: Message) -> None:
        if self._sent:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._start = message
            if self.headers.get("content-type", "").startswith("text/event-stream"):
                await self._on_stream()
                await self.deliver()
        else:
            self.body += message.get("body", b"")
            self._ended = not message.get("more_body", False)
            if len(self.body) > MAX_BUFFERED:
                await self.deliver()
                self.body.clear()
            else:
                self.complete = self._ended

    async def deliver(self) -> None:
        """Send what is buffered; whatever follows is sent while it is produced."""
        if self._start is None or self._sent:
            return
        self._sent = True
        await self._send(self._start)
        body = {"type": "http.response.body", "body": bytes(self.body)}
        await self._send({**body, "more_body": not self._ended})
