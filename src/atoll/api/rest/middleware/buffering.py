"""
The two halves of a request that is done once: its body, hashed as it is read, and its answer, held
back until it is whole. Both take the same small memory whatever the size of what passes.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Message, Receive, Scope, Send

SMALL = 64 * 1024
"""Bytes of a body that are read before anything else happens."""
MAX_HELD = 8 * 1024 * 1024
"""Bytes of an answer; a larger one is let through as it comes."""
_LONG = 512 * 1024
"""Bytes whose hash is worth a thread."""
_SEPARATOR = b"\0"


class HashedRequestBody:
    """A body on its way to the application, which may read it to its end or not at all."""

    def __init__(self, scope: Scope, receive: Receive, key: bytes) -> None:
        self._receive = receive
        self._first: Message | None = None
        self._digest = hashlib.sha256()
        # With the client's key, which is stored nowhere: who reads the fingerprint cannot guess at
        # a secret in the body.
        for part in (key, scope["method"].encode(), scope["path"].encode(), scope["query_string"]):
            self._digest.update(part + _SEPARATOR)
        self.whole = False
        self.gone = False
        """The client left before it was whole."""

    @property
    def fingerprint(self) -> str | None:
        """A digest of key, method, path, query and body, once that is known."""
        return self._digest.hexdigest() if self.whole else None

    async def begin(self) -> None:
        """Read a small body to its end, and of a large one the beginning."""
        start = bytearray()
        while not self.whole and not self.gone and len(start) <= SMALL:
            start += (await self._next()).get("body", b"")
        more = not self.whole
        self._first = {"type": "http.request", "body": bytes(start), "more_body": more}

    async def receive(self) -> Message:
        first, self._first = self._first, None
        return await self._next() if first is None else first

    async def drain(self) -> None:
        """Read the rest, for its hash alone."""
        while not self.whole and not self.gone:
            await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.gone = not self.whole
            return message
        piece: bytes = message.get("body", b"")
        if len(piece) > _LONG:
            await asyncio.to_thread(self._digest.update, piece)
        else:
            self._digest.update(piece)
        self.whole = not message.get("more_body", False)
        return message


class BufferedResponse:
    """
    An answer that is sent when told to. One that is too large for that, or has no end to wait for
    (an event stream), is let through as it comes.
    """

    def __init__(self, send: Send, on_stream: Callable[[], Awaitable[None]]) -> None:
        self._send = send
        self._on_stream = on_stream
        """Called before the first of an event stream is let through."""
        self._start: Message | None = None
        self._ended = False
        self._sent = False
        self.whole = False
        """It was held from its beginning to its end."""
        self.body = bytearray()

    @property
    def status(self) -> int | None:
        status: int | None = None if self._start is None else self._start["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        """Names are in lower case; of several with one name, the last."""
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
            if len(self.body) > MAX_HELD:
                await self.deliver()
                self.body.clear()
            else:
                self.whole = self._ended

    async def deliver(self) -> None:
        """Send what is held; what is still to come follows by itself."""
        if self._start is None or self._sent:
            return
        self._sent = True
        await self._send(self._start)
        body = {"type": "http.response.body", "body": bytes(self.body)}
        await self._send({**body, "more_body": not self._ended})
