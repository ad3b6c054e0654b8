"""
The body of a request that may be served here, sent to another node, or tried on several in turn.

Only its beginning is in memory, so a small body can be sent again and a large one cannot.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.api.rest.middleware.bodies import ClientDisconnected
from atoll.api.rest.middleware.buffering import SMALL
from atoll.service.nodes.forward_token import Content, body_refused

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Message, Receive, Scope, Send


class ReplayableBody:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._at_end = asyncio.Event()
        self._replayed = False
        self.data = b""
        self.complete = False
        """Whether all of it is in memory."""
        self.consumed = False
        """Whether a part that is not in memory was passed on: it cannot be sent again."""

    async def read(self, limit: int | None = SMALL) -> None:
        """Read to the end, or until more than `limit` bytes are in memory."""
        pieces, size = [self.data], len(self.data)
        while not self.complete and (limit is None or size <= limit):
            message = await self._next()
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            self.complete = not message.get("more_body", False)
        self.data = b"".join(pieces)
        if self.complete:
            self._at_end.set()

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        return message

    def content(self) -> bytes | AsyncIterator[bytes] | None:
        """The body for an HTTP client."""
        return (self.data or None) if self.complete else self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        self.consumed = True
        yield self.data
        more = True
        while more:
            message = await self._next()
            more = message.get("more_body", False)
            if piece := message.get("body", b""):
                yield piece
        self._at_end.set()

    async def described(self, headers: list[tuple[bytes, bytes]]) -> Content:
        """Length and digest, as far as they are known before the body is sent."""
        if self.complete:
            return await _described(self.data)
        return Content(content_length(headers))

    async def check(self, content: Content, headers: list[tuple[bytes, bytes]]) -> None:
        """Raises `Forbidden` unless it is the body that another node has described."""
        if content.digest is None:
            if content.length != content_length(headers):
                raise body_refused()
            return
        await self.read(limit=content.length)
        if not self.complete or await _described(self.data) != content:
            raise body_refused()

    async def receive(self) -> Message:
        """The ASGI channel for an application of this process."""
        if self._replayed:
            self.consumed = not self.complete
            return await self._receive()
        self._replayed = True
        return {"type": "http.request", "body": self.data, "more_body": not self.complete}

    def rewind(self) -> None:
        """Let the next application read from the beginning."""
        self._replayed = False

    async def client_left(self) -> None:
        """Wait until the client that sent the complete body disconnects."""
        await self._at_end.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


@dataclass(frozen=True, slots=True)
class ClientRequest:
    scope: Scope
    body: ReplayableBody
    send: Send


async def _described(data: bytes) -> Content:
    return Content.of(data) if len(data) <= SMALL else await asyncio.to_thread(Content.of, data)


def content_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    for name, value in headers:
        if name.lower() == b"content-length":
            return int(value)
    return None
