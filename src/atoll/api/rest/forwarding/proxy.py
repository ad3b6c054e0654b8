"""
One request passed on to another node, and its answer passed back, both as they come.

A body of any size takes the memory of a piece; only its beginning is kept, so that a small one can
be sent again. A client that goes away ends what was asked of the node, a node that is lost ends the
answer. Nothing is repeated here: who calls decides by what may have been begun.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import structlog

from atoll.api.rest.middleware.buffering import SMALL
from atoll.service.nodes.forward_token import Content, ForwardToken, body_refused
from atoll.service.nodes.peers import FORWARD_HEADER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection

    from starlette.types import Message, Receive, Scope, Send

    from atoll.model.node import Node
    from atoll.service.nodes.peers import Peers

log = structlog.get_logger(__name__)

REFUSING = frozenset({421, 503, 507})
"""How a node says that it cannot, and that another one may."""
MAX_REFUSAL = 64 * 1024
"""Bytes of an answer that is read to be decided by."""
_PER_CONNECTION = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# The way to here has seen to these.
_NOT_PASSED = _PER_CONNECTION | {b"expect", b"origin", FORWARD_HEADER.lower().encode()}


class NodeNotReached(Exception):
    """The node did not answer; `begun` says whether it may have begun with what was asked."""

    def __init__(self, why: str, *, begun: bool) -> None:
        super().__init__(why)
        self.begun = begun


class ClientDisconnected(Exception):
    """The client left before its request was whole."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that was not passed back."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def code(self) -> str | None:
        try:
            found = json.loads(self.body)
        except ValueError:
            return None
        return found.get("code") if isinstance(found, dict) else None

    async def tell(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status, "headers": self.headers}
        await send(start)
        await send({"type": "http.response.body", "body": self.body})


class RefusalFilter:
    """An answer of this node on its way, but for a refusal with one of these codes."""

    def __init__(self, send: Send, codes: Collection[str]) -> None:
        self._send = send
        self._codes = codes
        self._start: Message | None = None
        self._body = b""
        self.refusal: Refusal | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in REFUSING:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            start, self._start = self._start, None
            refusal = Refusal(start["status"], list(start.get("headers", ())), self._body)
            if refusal.code in self._codes:
                self.refusal = refusal
            else:
                await refusal.tell(self._send)


class Body:
    """A request's body: its beginning in memory, the rest as it comes."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._at_end = asyncio.Event()
        self._replayed = False
        self.data = b""
        self.whole = False
        """Whether all of it is in memory."""
        self.spent = False
        """Whether something was given away that is not in memory."""

    async def begin(self, limit: int | None = SMALL) -> None:
        """Read it to its end, or beyond `limit` bytes."""
        pieces, size = [self.data], len(self.data)
        while not self.whole and (limit is None or size <= limit):
            message = await self._next()
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            self.whole = not message.get("more_body", False)
        self.data = b"".join(pieces)
        if self.whole:
            self._at_end.set()

    async def _next(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        return message

    def content(self) -> bytes | AsyncIterator[bytes] | None:
        """The body as a client sends it."""
        return (self.data or None) if self.whole else self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        self.spent = True
        yield self.data
        more = True
        while more:
            message = await self._next()
            more = message.get("more_body", False)
            if piece := message.get("body", b""):
                yield piece
        self._at_end.set()

    async def described(self, headers: list[tuple[bytes, bytes]]) -> Content:
        """What of it is known before it is sent."""
        if self.whole:
            return await _described(self.data)
        return Content(content_length(headers))

    async def check(self, content: Content, headers: list[tuple[bytes, bytes]]) -> None:
        """`Forbidden` unless it is the body that a node has described."""
        if content.digest is None:
            if content.length != content_length(headers):
                raise body_refused()
            return
        await self.begin(limit=content.length)
        if not self.whole or await _described(self.data) != content:
            raise body_refused()

    async def receive(self) -> Message:
        """The request as an application here is told it."""
        if self._replayed:
            self.spent = not self.whole
            return await self._receive()
        self._replayed = True
        return {"type": "http.request", "body": self.data, "more_body": not self.whole}

    def again(self) -> None:
        """An application here is to be told it from its beginning once more."""
        self._replayed = False

    async def left(self) -> None:
        """Until the client is gone that sent it all."""
        await self._at_end.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


async def pass_on(
    peers: Peers,
    node: Node,
    scope: Scope,
    body: Body,
    send: Send,
    refusals: Collection[str] = ("wrong_node",),
) -> Refusal | None:
    """
    Have a node answer. A refusal with one of these codes is given back; any other answer has gone
    to the client. `NotReached` when there was none.
    """
    hop = ForwardToken(node.id, scope["scheme"], await body.described(scope["headers"]))
    exchange = _Exchange(peers, node, scope, body, send, refusals, hop)
    work = asyncio.ensure_future(exchange.run())
    gone, lost = (
        asyncio.ensure_future(body.left()),
        asyncio.ensure_future(peers.wait_until_lost(node.id)),
    )
    tasks = (work, gone, lost)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if gone.done() or exchange.answering:
            # Nobody hears it, or what was heard of it cannot be finished.
            return None
        raise NodeNotReached(f"node {node.id} was lost", begun=True)
    except ClientDisconnected:
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Exchange:
    def __init__(
        self,
        peers: Peers,
        node: Node,
        scope: Scope,
        body: Body,
        send: Send,
        refusals: Collection[str],
        hop: ForwardToken,
    ) -> None:
        self._client = peers.client
        self._node = node
        self._send = send
        self._refusals = refusals
        self.answering = False
        """Whether the client has been told the beginning of an answer."""
        target = target_of(scope)
        token = peers.sign(hop, scope["method"], target)
        self._request = httpx.Request(
            scope["method"],
            node.url,
            headers=[*passed_on(scope["headers"]), (FORWARD_HEADER.encode(), token.encode())],
            content=body.content(),
            # As it came: a path that is put in order may be another one.
            extensions={"target": target},
        )

    async def run(self) -> Refusal | None:
        try:
            answer = await self._client.send(self._request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise NodeNotReached(_words(error), begun=False) from error
        except httpx.TransportError as error:
            raise NodeNotReached(_words(error), begun=True) from error
        try:
            return await self._pass_back(answer)
        except httpx.TransportError as error:
            if not self.answering:
                raise NodeNotReached(_words(error), begun=True) from error
            # An answer that does not end as it should is all that can be said now.
            log.warning("peer.broke_off", node_id=self._node.id, error=_words(error))
            return None
        finally:
            await answer.aclose()

    async def _pass_back(self, answer: httpx.Response) -> Refusal | None:
        headers = [
            (name, value)
            for name, value in answer.headers.raw
            if name.lower() not in _named(answer.headers.raw)
        ]
        if answer.status_code in REFUSING:
            refusal = Refusal(answer.status_code, headers, await _beginning(answer))
            if refusal.code in self._refusals:
                return refusal
            self.answering = True
            await refusal.tell(self._send)
            return None
        self.answering = True
        await self._send(
            {"type": "http.response.start", "status": answer.status_code, "headers": headers}
        )
        async for piece in answer.aiter_raw():
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})
        return None


async def _described(data: bytes) -> Content:
    return Content.of(data) if len(data) <= SMALL else await asyncio.to_thread(Content.of, data)


def content_length(headers: list[tuple[bytes, bytes]]) -> int | None:
    for name, value in headers:
        if name.lower() == b"content-length":
            return int(value)
    return None


def target_of(scope: Scope) -> bytes:
    """Path and query as the client sent them."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def passed_on(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Those that are for who answers, and not for this connection."""
    dropped = _NOT_PASSED | _named(headers)
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def _named(headers: list[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Headers of the connection: always the same ones, and those that `Connection` names."""
    more = {
        word.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for word in value.split(b",")
    }
    return _PER_CONNECTION | more if more else _PER_CONNECTION


async def _beginning(answer: httpx.Response) -> bytes:
    pieces, size = [], 0
    async for piece in answer.aiter_raw():
        pieces.append(piece)
        size += len(piece)
        if size > MAX_REFUSAL:
            raise httpx.RemoteProtocolError("a refusal that does not end")
    return b"".join(pieces)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
