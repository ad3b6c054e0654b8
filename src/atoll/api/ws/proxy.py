"""
A WebSocket passed on to another node: messages both ways as they come, and the close with its code.

The origin of a page is checked where it came to; the key is checked by both. What the node answers
instead of a WebSocket is passed back as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from atoll.api.rest.forwarding.proxy import forwarded_headers, target_of
from atoll.api.ws.console import SEND_SECONDS
from atoll.api.ws.protocol import PING_SECONDS
from atoll.service.nodes.forward_token import Content, ForwardToken
from atoll.service.nodes.peers import FORWARD_HEADER

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send
    from websockets.asyncio.client import ClientConnection

    from atoll.model.node import Node
    from atoll.service.nodes.peers import Peers

MAX_MESSAGE = 1 << 20
"""Bytes of one message from a node."""
CLOSE_SECONDS = 2.0
BAD_GATEWAY = 1014
"""The close of one whose node has gone: who comes back finds it where it then is."""
NORMAL, GOING_AWAY = 1000, 1001
MISDIRECTED = 421


class WebSocketProxy:
    def __init__(self, peers: Peers, scope: Scope, receive: Receive, send: Send) -> None:
        self._peers = peers
        self._scope = scope
        self.client = WebSocket(scope, receive, send)

    async def run(self, node: Node) -> bool:
        """False when the node does not answer, or does not have what it is asked for."""
        try:
            upstream = await self._open(node)
        except InvalidStatus as error:
            if error.response.status_code == MISDIRECTED:
                return False
            answer = error.response
            await self._deny(answer.status_code, dict(answer.headers), bytes(answer.body or b""))
            return True
        except (OSError, TimeoutError, WebSocketException):
            return False
        try:
            await self.client.accept(upstream.subprotocol)
            await self._both_ways(node, upstream)
        except (WebSocketDisconnect, RuntimeError):
            pass  # It left while it was let in.
        finally:
            await upstream.close(GOING_AWAY)
        return True

    async def _open(self, node: Node) -> ClientConnection:
        target = target_of(self._scope)
        parts = urlsplit(node.url)
        secure = parts.scheme == "https"
        scheme = "https" if self._scope["scheme"] == "wss" else "http"
        own = (b"host", b"user-agent")
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in forwarded_headers(self._scope["headers"])
            if name not in own and not name.startswith(b"sec-websocket")
        ]
        hop = ForwardToken(node.id, scheme, Content.of(b""))
        headers.append((FORWARD_HEADER, self._peers.sign(hop, "GET", target)))
        options: dict[str, Any] = {"ssl": self._peers.tls} if secure else {}
        if offered := self._scope.get("subprotocols"):
            options["subprotocols"] = offered
        return await connect(
            f"{'wss' if secure else 'ws'}://{parts.netloc}{target.decode('latin-1')}",
            additional_headers=headers,
            user_agent_header=None,
            proxy=None,
            compression=None,
            open_timeout=self._peers.handshake_timeout,
            close_timeout=CLOSE_SECONDS,
            ping_interval=PING_SECONDS,
            ping_timeout=PING_SECONDS,
            max_size=MAX_MESSAGE,
            **options,
        )

    async def _deny(self, status: int, headers: dict[str, str], body: bytes) -> None:
        kept = {
            name: value
            for name, value in headers.items()
            if name.lower() in ("content-type", "retry-after", "www-authenticate")
        }
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await self.client.send_denial_response(Response(body, status, kept))

    async def _both_ways(self, node: Node, upstream: ClientConnection) -> None:
        parts = [
            asyncio.ensure_future(part)
            for part in (self._there(upstream), self._back(upstream), self._lost(node))
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            closed = done.pop().result()
        except (TimeoutError, WebSocketDisconnect, OSError):
            closed = None
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        if closed is not None:
            with contextlib.suppress(TimeoutError, RuntimeError, WebSocketDisconnect):
                async with asyncio.timeout(SEND_SECONDS):
                    await self.client.close(*closed)

    async def _there(self, upstream: ClientConnection) -> None:
        """What the client says, until it leaves: nobody is there to be told why it ended."""
        while True:
            message = await self.client.receive()
            if message["type"] == "websocket.disconnect":
                code = message.get("code", NORMAL)
                await upstream.close(code if _may_be_sent(code) else GOING_AWAY)
                return
            data: bytes | str | None = message.get("bytes")
            try:
                await upstream.send(message["text"] if data is None else data)
            except ConnectionClosed:
                # Why, and what it said before, the other direction tells.
                await asyncio.Event().wait()

    async def _back(self, upstream: ClientConnection) -> tuple[int, str]:
        """What the node says; the close, when it comes."""
        try:
            while True:
                message = await upstream.recv()
                async with asyncio.timeout(SEND_SECONDS):
                    if isinstance(message, bytes):
                        await self.client.send_bytes(message)
                    else:
                        await self.client.send_text(message)
        except ConnectionClosed as error:
            if error.rcvd is None:
                return BAD_GATEWAY, "the node has gone"
            code = error.rcvd.code
            return (code if _may_be_sent(code) else NORMAL), error.rcvd.reason

    async def _lost(self, node: Node) -> tuple[int, str]:
        await self._peers.wait_until_lost(node.id)
        return BAD_GATEWAY, "the node has gone"


def _may_be_sent(code: int) -> bool:
    return code in range(3000, 5000) or code in {*range(1000, 1015)} - {1004, 1005, 1006}
