"""
Streams a request to another node and its response back, without buffering either.

A client that disconnects ends the request at the node; a node that is lost ends the response.
Nothing is retried here: `NodeNotReached` tells the caller whether the node may have started to
serve it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import httpx
import structlog

from atoll.api.rest.forwarding.refusals import Refusal
from atoll.api.rest.forwarding.request_body import ClientDisconnected
from atoll.api.rest.problems import NODE_REFUSALS
from atoll.service.nodes.forward_token import ForwardToken
from atoll.service.nodes.peers import FORWARD_HEADER

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import Scope

    from atoll.api.rest.forwarding.request_body import ClientRequest
    from atoll.model.node import Node
    from atoll.service.nodes.peers import Peers

log = structlog.get_logger(__name__)

MAX_REFUSAL = 64 * 1024
"""Bytes of a refusal, which is read completely."""
_HOP_BY_HOP = frozenset(
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
# This node has handled `Expect` and checked `Origin`, and signs its own forward token.
_NOT_FORWARDED = _HOP_BY_HOP | {b"expect", b"origin", FORWARD_HEADER.lower().encode()}


class NodeNotReached(Exception):
    """The node did not respond."""

    def __init__(self, reason: str, *, may_have_started: bool) -> None:
        super().__init__(reason)
        self.may_have_started = may_have_started


async def forward(
    peers: Peers, node: Node, request: ClientRequest, refusals: Collection[str]
) -> Refusal | None:
    """
    Have a node serve a request. A refusal with one of these codes is returned; any other response
    was sent to the client. Raises `NodeNotReached` if there was none.
    """
    scope = request.scope
    token = ForwardToken(node.id, scope["scheme"], await request.body.described(scope["headers"]))
    exchange = _Exchange(peers, node, request, refusals, token)
    work = asyncio.ensure_future(exchange.run())
    client_left = asyncio.ensure_future(request.body.client_left())
    node_lost = asyncio.ensure_future(peers.wait_until_lost(node.id))
    tasks = (work, client_left, node_lost)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if client_left.done() or exchange.response_started:
            return None
        raise NodeNotReached(f"node {node.id} was lost", may_have_started=True)
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
        request: ClientRequest,
        refusals: Collection[str],
        token: ForwardToken,
    ) -> None:
        self._client = peers.client
        self._node = node
        self._send = request.send
        self._refusals = refusals
        self.response_started = False
        """Whether the client has received the beginning of a response."""
        scope = request.scope
        target = target_of(scope)
        header = (FORWARD_HEADER.encode(), peers.sign(token, scope["method"], target).encode())
        self._request = httpx.Request(
            scope["method"],
            node.url,
            headers=[*forwarded_headers(scope["headers"]), header],
            content=request.body.content(),
            # Byte by byte: a normalized path may name something else.
            extensions={"target": target},
        )

    async def run(self) -> Refusal | None:
        try:
            response = await self._client.send(self._request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise NodeNotReached(_text_of(error), may_have_started=False) from error
        except httpx.TransportError as error:
            raise NodeNotReached(_text_of(error), may_have_started=True) from error
        try:
            return await self._return(response)
        except httpx.TransportError as error:
            if not self.response_started:
                raise NodeNotReached(_text_of(error), may_have_started=True) from error
            # The client sees a response that ends too early: its status is sent already.
            log.warning("peer.response_aborted", node_id=self._node.id, error=_text_of(error))
            return None
        finally:
            await response.aclose()

    async def _return(self, response: httpx.Response) -> Refusal | None:
        dropped = _hop_by_hop(response.headers.raw)
        headers = [
            (name, value) for name, value in response.headers.raw if name.lower() not in dropped
        ]
        if response.status_code in NODE_REFUSALS:
            refusal = Refusal(response.status_code, headers, await _read_refusal(response))
            if refusal.code in self._refusals:
                return refusal
            self.response_started = True
            await refusal.send(self._send)
            return None
        self.response_started = True
        await self._send(
            {"type": "http.response.start", "status": response.status_code, "headers": headers}
        )
        async for piece in response.aiter_raw():
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})
        return None


def target_of(scope: Scope) -> bytes:
    """Path and query as the client sent them."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def forwarded_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    dropped = _NOT_FORWARDED | _hop_by_hop(headers)
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def _hop_by_hop(headers: list[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """The headers that always concern one connection, and those that `Connection` lists."""
    listed = {
        word.strip().lower()
        for name, value in headers
        if name.lower() == b"connection"
        for word in value.split(b",")
    }
    return _HOP_BY_HOP | listed if listed else _HOP_BY_HOP


async def _read_refusal(response: httpx.Response) -> bytes:
    pieces, size = [], 0
    async for piece in response.aiter_raw():
        pieces.append(piece)
        size += len(piece)
        if size > MAX_REFUSAL:
            raise httpx.RemoteProtocolError("the refusal is too large")
    return b"".join(pieces)


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__
