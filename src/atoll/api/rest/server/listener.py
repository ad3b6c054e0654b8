"""
Accepts connections, up to the limit.

uvloop's own server accepts without limit, and does not count connections during their TLS
handshake. This one counts each connection as soon as it has a descriptor.
"""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING

import structlog

from atoll.api.rest.server.http_connections import LINGER, TOO_MANY
from atoll.api.rest.server.open_files import RESERVE

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Callable

    from uvicorn.server import ServerState

    from atoll.api.rest.server.http_connections import HttpConnections

log = structlog.get_logger(__name__)

BATCH = 64
"""Connections that are accepted before the event loop does something else."""
RETRY_DELAY = 0.1
"""Seconds until the next try after the system ran out of descriptors."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener:
    """Serves one listening socket; `close` and `wait_closed` are those of an asyncio server."""

    def __init__(
        self,
        listener: socket.socket,
        connections: HttpConnections,
        state: ServerState,
        make: Callable[[bool, Callable[[], None]], asyncio.Protocol],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._connections = connections
        self._state = state
        self._make = make
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[_Handshake] = set()
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)
        self._sweep = self._loop.create_task(connections.sweep(state))
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listener)
            for opening in list(self._opening):
                opening.evict()

    async def wait_closed(self) -> None:
        self._sweep.cancel()
        await asyncio.gather(self._sweep, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(BATCH):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                log.warning("connection.not_accepted", error=str(error))
                self._loop.remove_reader(self._listener)
                self._loop.call_later(RETRY_DELAY, self._resume)
                return
            self._admit(accepted)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _admit(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        limit = self._connections.limit
        # Evicted connections may still be counted, so one eviction may not be enough.
        while self._count() >= limit and self._connections.evict():
            pass
        count = self._count()
        if count >= limit + RESERVE:
            self._turn_away(accepted)
        else:
            _Handshake(self, accepted, reserved=count >= limit)

    def _count(self) -> int:
        return len(self._state.connections) + len(self._opening)

    def _turn_away(self, accepted: socket.socket) -> None:
        try:
            if self._tls is None:
                accepted.send(TOO_MANY)
        except OSError:
            pass  # The client has left or does not read.
        finally:
            accepted.close()


class _Handshake:
    """A connection from its acceptance to the end of its TLS handshake."""

    def __init__(self, server: Listener, accepted: socket.socket, *, reserved: bool) -> None:
        self._server = server
        self._accepted = accepted
        server._opening.add(self)
        server._connections.waiting[self] = None
        self._task = server._loop.create_task(self._open(reserved))

    def evict(self) -> None:
        self._opened()
        self._task.cancel()
        self._accepted.close()  # A task that has not started would never close it.

    async def _open(self, reserved: bool) -> None:
        server = self._server
        tls = server._tls
        protocol = server._make(reserved, self._opened)
        try:
            await server._loop.connect_accepted_socket(
                lambda: protocol,
                self._accepted,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else server._connections.header_timeout,
                ssl_shutdown_timeout=None if tls is None else LINGER,
            )
        except OSError as error:  # TLS errors and time-outs are among these.
            log.debug("connection.not_opened", error=str(error))
            self._accepted.close()
        except asyncio.CancelledError:
            # uvloop does not report a connection that is cancelled while it is opened as lost.
            if protocol in server._state.connections:
                protocol.connection_lost(None)
            raise
        finally:
            self._opened()

    def _opened(self) -> None:
        """From now on the protocol is counted, or nothing if opening failed."""
        self._server._opening.discard(self)
        self._server._connections.waiting.pop(self, None)
