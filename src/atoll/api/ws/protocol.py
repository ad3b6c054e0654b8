"""
uvicorn's WebSocket protocol with a time-out for clients that do not read, and bounded buffers.

uvicorn's own closes a connection only after all pending data is sent: a client that stalls would
keep its connection for ever, and delay the server's shutdown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from atoll.api.rest.server.http_connections import WriteProgress, reset

if TYPE_CHECKING:
    import asyncio

    from websockets.frames import Frame

    from atoll.api.rest.server.http_connections import HttpConnections

MAX_MESSAGE = 64 * 1024
"""Bytes of one message from a client."""
PING_INTERVAL = 20.0
"""Seconds between two pings, and at most until the pong."""
LINGER_SECONDS = 1.0
"""Time for pending data and the closing handshake when a connection ends."""


MAX_FRAGMENTS = 1024
"""Frames of one message: empty frames do not count towards its size."""


class WebSocketProtocol(WebSocketsSansIOProtocol):
    def __init__(self, *args: Any, connections: HttpConnections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.close_timeout = LINGER_SECONDS
        self._write_timeout = connections.write_timeout

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._writing = WriteProgress(self.transport, self.loop.time())

    def resume_writing(self) -> None:
        self._writing.progressed(self.loop.time())
        super().resume_writing()

    def check(self, now: float) -> None:
        """Close the connection if the client does not read."""
        if self._writing.stalled(now, self._write_timeout):
            reset(self.transport)

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            # The pongs for a client that pings and does not read would fill the memory.
            self.conn.data_to_send()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_FRAGMENTS:
            self.transport.abort()
        else:
            super().handle_cont(event)

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # A response that is not a WebSocket ends the handshake too.
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
