"""
uvicorn's WebSocket protocol, with an end for clients that do not read.

As it is, it closes a connection when all that waits is sent, so one whose client stands still would
never go, and hold up the end of the server as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

if TYPE_CHECKING:
    import asyncio

MAX_MESSAGE = 64 * 1024
"""Bytes of one message from a client."""
PING_SECONDS = 20.0
"""Between two pings, and at most until the answer to one."""
LINGER_SECONDS = 1.0
"""For what waits to be sent when the connection is to end, and for the client to agree."""


class Protocol(WebSocketsSansIOProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = LINGER_SECONDS

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # An answer that is no WebSocket is the end of the handshake too.
            self.handshake_complete = True

    def shutdown(self) -> None:
        super().shutdown()
        self._abort_soon()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._abort_soon()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self._abort_soon()

    def _abort_soon(self) -> None:
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)
