"""
Forwards a WebSocket to another node: messages in both directions, and the close with its code.

The first node checks the origin of a web page; both check the API key. If the node refuses the
WebSocket, the client gets its response.
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
from atoll.api.ws.console import SEND_TIMEOUT
from atoll.api.ws.protocol import PING_INTERVAL
from atoll.service.nodes.forward_token import Content, ForwardToken
from atoll.service.nodes.peers import FORWARD_HEADER

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send
    from websockets.asyncio.client import ClientConnection

    from atoll.model.node import Node
    from atoll.service.nodes.peers import Peers

MAX_MESSAGE = 1 << 20
"""Bytes of one message of a node."""
CLOSE_TIMEOUT = 2.0
BAD_GATEWAY = 1014
"""Close code if the node is lost. A client that reconnects reaches the session's new node."""
NORMAL, GOING_AWAY = 1000, 1001
MISDIRECTED = 421


class WebSocketProxy:
    def __init__(self, peers: Peers, scope: Scope, receive: Receive, send: Send) -> None:
        self._peers = peers
        self._scope = scope
        self.client = WebSocket(scope, receive, send)

    async def run(self, node: Node) -> bool:
        """Returns False if the node does not respond or does not have the session."""
        try:
            upstream = await self._open(node)
        except InvalidStatus as error:
            if error.response.status_code == MISDIRECTED:
                return False
            response = error.response
            body = bytes(response.body or b"")
            await self._deny(response.status_code, dict(response.headers), body)
            return True
        except (OSError, TimeoutError, WebSocketException):
            return False
        try:
            await self.client.accept(upstream.subprotocol)
            await self._forward_both_ways(node, upstream)
        except (WebSocketDisconnect, RuntimeError):
            pass  # The client left during the handshake.
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
        token = ForwardToken(node.id, scheme, Content.of(b""))
        headers.append((FORWARD_HEADER, self._peers.sign(token, "GET", target)))
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
            close_timeout=CLOSE_TIMEOUT,
            ping_interval=PING_INTERVAL,
            ping_timeout=PING_INTERVAL,
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

    async def _forward_both_ways(self, node: Node, upstream: ClientConnection) -> None:
        parts = [
            asyncio.ensure_future(part)
            for part in (
                self._from_client(upstream),
                self._from_node(upstream),
                self._until_lost(node),
            )
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
                async with asyncio.timeout(SEND_TIMEOUT):
                    await self.client.close(*closed)

    async def _from_client(self, upstream: ClientConnection) -> None:
        """Forward the client's messages until it leaves."""
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
                # The other direction delivers the last messages and the reason.
                await asyncio.Event().wait()

    async def _from_node(self, upstream: ClientConnection) -> tuple[int, str]:
        """Forward the node's messages; returns its close code and reason."""
        try:
            while True:
                message = await upstream.recv()
                async with asyncio.timeout(SEND_TIMEOUT):
                    if isinstance(message, bytes):
                        await self.client.send_bytes(message)
                    else:
                        await self.client.send_text(message)
        except ConnectionClosed as error:
            if error.rcvd is None:
                return BAD_GATEWAY, "the node was lost"
            code = error.rcvd.code
            return (code if _may_be_sent(code) else NORMAL), error.rcvd.reason

    async def _until_lost(self, node: Node) -> tuple[int, str]:
        await self._peers.wait_until_lost(node.id)
        return BAD_GATEWAY, "the node was lost"


def _may_be_sent(code: int) -> bool:
    return code in range(3000, 5000) or code in {*range(1000, 1015)} - {1004, 1005, 1006}
