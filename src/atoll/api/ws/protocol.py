"""
uvicorn's WebSocket protocol, with an end for clients that do not read, and bounded buffers.

As it is, it closes a connection when all that waits is sent, so one whose client stands still would
never go, and hold up the end of the server as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from atoll.api.rest.server.http_connections import WriteProgress, reset

if TYPE_CHECKING:
    import asyncio

    from websockets.frames import Frame

    from atoll.api.rest.server.http_connections import Connections

MAX_MESSAGE = 64 * 1024
"""Bytes of one message from a client."""
PING_SECONDS = 20.0
"""Between two pings, and at most until the answer to one."""
LINGER_SECONDS = 1.0
"""For what waits to be sent when the connection is to end, and for the client to agree."""


MAX_FRAGMENTS = 1024
"""Frames of one message: empty ones would not count towards its size."""


class Protocol(WebSocketsSansIOProtocol):
    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
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
        """End the connection when the client does not read."""
        if self._writing.stalled(now, self._write_timeout):
            reset(self.transport)

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            # A client that pings and does not read would fill the memory with answers.
            self.conn.data_to_send()

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_FRAGMENTS:
            self.transport.abort()
        else:
            super().handle_cont(event)

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
