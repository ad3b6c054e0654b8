"""
HTTP connections of a server: their number, and the time-outs of slow clients.

A request's header must arrive in time, its body must make progress, and a response must be read.
One sweep over all connections checks this, so requests start no timers. At the limit, a new
connection replaces the one that has waited longest without a complete request. If all of them are
busy, a few more are accepted for health checks; other requests on these are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import structlog
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atoll.api.rest.middleware.bodies import SAFE_METHODS, is_upload
from atoll.api.rest.problems import problem
from atoll.errors import InvalidRequest, TemporaryError
from atoll.service.nodes.probe import PATH as NODE_PROBE

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn._types import ASGI3Application
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
    from uvicorn.server import ServerState

    from atoll.errors import AtollError
    from atoll.settings import ConnectionSettings

log = structlog.get_logger(__name__)

HEALTH_CHECKS = frozenset({"/health", "/ready", NODE_PROBE})
MAX_HEADER = 64 * 1024
"""Bytes of a request's header."""
MAX_PIPELINED = 16
"""Requests that a client may send before it has the responses to earlier ones."""
SMALL_BODY_TIMEOUTS = 10
"""A body that is not an upload must be complete after this many body time-outs."""
MAX_SWEEP_INTERVAL = 1.0
SWEEPS_PER_TIMEOUT = 4
LINGER = 1.0
"""Seconds that a closed connection has to send the rest of its data."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: drop unsent data instead of keeping it in the kernel for a stalled client."""

HEADER_TIMEOUT = 10.0
"""Seconds for a request's header, and for the TLS handshake before it."""
BODY_TIMEOUT = 30.0
"""
Seconds for the next bytes of a request's body. A body that is not an upload has ten times as
long in all.
"""
WRITE_TIMEOUT = 30.0
"""Seconds within which a client must read some of what is sent to it."""


class Waiting(Protocol):
    """A connection without a complete request."""

    def evict(self) -> None: ...


class HttpConnections:
    """All HTTP connections of one server process."""

    def __init__(self, settings: ConnectionSettings, limit: int) -> None:
        self.limit = limit
        self.header_timeout = HEADER_TIMEOUT
        self.body_timeout = BODY_TIMEOUT
        self.write_timeout = WRITE_TIMEOUT
        self.keep_alive = settings.keep_alive.total_seconds()
        self.waiting: dict[Waiting, None] = {}
        """The one that has waited longest comes first."""
        shortest = min(self.header_timeout, self.body_timeout, self.write_timeout, self.keep_alive)
        self._interval = min(MAX_SWEEP_INTERVAL, shortest / SWEEPS_PER_TIMEOUT)

    def evict(self) -> bool:
        """Close the connection that has waited longest; False if all are busy."""
        oldest = next(iter(self.waiting), None)
        if oldest is None:
            return False
        del self.waiting[oldest]
        oldest.evict()
        return True

    async def sweep(self, state: ServerState) -> None:
        """Close connections that have exceeded a time-out, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._interval)
            now = loop.time()
            for connection in list(state.connections):
                connection.check(now)  # type: ignore[union-attr]


class WriteProgress:
    """Detects clients that do not read."""

    def __init__(self, transport: asyncio.Transport, now: float) -> None:
        self._transport = transport
        self._unsent = 0
        self._progressed_at = now

    def progressed(self, now: float) -> None:
        self._progressed_at = now

    def stalled(self, now: float, timeout: float) -> bool:
        unsent = self._transport.get_write_buffer_size()
        if unsent == 0 or unsent < self._unsent:
            self._progressed_at = now
        self._unsent = unsent
        return now - self._progressed_at > timeout


def reset(transport: asyncio.Transport) -> None:
    """Close a connection whose client does not read, and free its unsent data."""
    with contextlib.suppress(OSError, AttributeError):
        found = transport.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with time-outs and limits for slow and greedy clients."""

    def __init__(
        self,
        *args: Any,
        connections: HttpConnections,
        opened: Callable[[], None],
        reserved: bool,
        **kwargs: Any,
    ) -> None:
        """`opened` is called once it is ready. A `reserved` one serves health checks only."""
        super().__init__(*args, **kwargs)
        self._all = connections
        self._opened = opened
        self._reserved = reserved
        if reserved:
            self.app = _HealthChecksOnly(self.app)
        self._in_header = True
        """Whether a header is expected, or has started to arrive."""
        self._in_body = False
        self._idle = False
        """Whether the last request is served and nothing of the next one has arrived."""
        self._since = 0.0
        """When the current phase started."""
        self._received_at = 0.0
        self._header_bytes = 0
        """Bytes outside of bodies since the last body: header, chunk headers, trailers."""
        self._closed_at: float | None = None
        self._reading: asyncio.Task[None] | None = None
        """The task that serves the current request, if its method is safe."""

    # Connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._opened()
        self._since = self.loop.time()
        self._writing = WriteProgress(transport, self._since)
        self._all.waiting[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.waiting.pop(self, None)
        super().connection_lost(exc)
        if self._reading is not None and not self.cycle.response_started:
            self._reading.cancel()  # It might wait for minutes although the client has left.
        # Pipelined requests behind it would be served although the client has left.
        self.pipeline.clear()

    def evict(self) -> None:
        self.connections.discard(self)  # It no longer counts towards the limit.
        self.transport.abort()

    def resume_writing(self) -> None:
        self._writing.progressed(self.loop.time())
        super().resume_writing()

    # Requests

    def data_received(self, data: bytes) -> None:
        if self._idle:
            self._idle, self._in_header, self._since = False, True, self.loop.time()
        if self._in_header or self._in_body:
            self._header_bytes += len(data)
        super().data_received(data)
        if (self._in_header or self._in_body) and self._header_bytes > MAX_HEADER:
            self._refuse(_HEADER_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_header:
            # A pipelined request, while an earlier one is being served.
            self._in_header, self._since, self._header_bytes = True, self.loop.time(), 0

    def handle_websocket_upgrade(self) -> None:
        super().handle_websocket_upgrade()
        self._all.waiting.pop(self, None)  # The WebSocket protocol owns the connection now.

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many pipelined requests")  # The client gets a 400.
        self._all.waiting.pop(self, None)
        self._idle = self._in_header = False
        self._in_body, self._header_bytes = True, 0
        self._since = self._received_at = self.loop.time()
        super().on_headers_complete()
        if self._reserved and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._received_at, self._header_bytes = self.loop.time(), 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:
            self._wait_for_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Only after the last request that has arrived: pipelined ones are served one by one.
        if self.cycle.response_complete and not self.transport.is_closing():
            if self._in_body:
                self._all.waiting[self] = None
            else:
                self._wait_for_request()

    def _wait_for_request(self) -> None:
        self._idle, self._since = True, self.loop.time()
        self._all.waiting[self] = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)
        self._reading = task if cycle.scope["method"] in SAFE_METHODS else None

    def _should_upgrade_to_ws(self) -> bool:
        return not self._reserved and super()._should_upgrade_to_ws()

    # Time-outs

    def check(self, now: float) -> None:
        if self._writing.stalled(now, self._all.write_timeout):
            log.info("connection.client_does_not_read", client=self.client)
            reset(self.transport)
        elif self.transport.is_closing():
            if self._closed_at is None:
                self._closed_at = now
            elif now - self._closed_at > self._all.write_timeout:
                reset(self.transport)
        elif self._in_header:
            if now - self._since > self._all.header_timeout:
                self._refuse(_HEADER_TIMEOUT)
        elif self._in_body:
            self._check_body(now)
        elif self._idle and now - self._since > self._all.keep_alive:
            self.transport.close()

    def _check_body(self, now: float) -> None:
        waits_for_continue = self.cycle is not None and self.cycle.waiting_for_100_continue
        if self.flow.read_paused or waits_for_continue:
            self._received_at = now  # The server does not read at the moment.
        responded = self.cycle is None or self.cycle.response_complete
        small = responded or not is_upload(self.scope)
        if now - self._received_at > self._all.body_timeout or (
            small and now - self._since > SMALL_BODY_TIMEOUTS * self._all.body_timeout
        ):
            self._refuse(_BODY_TIMEOUT)

    def _refuse(self, response: bytes) -> None:
        """Close the connection, with a response unless one has started."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            if self._in_header:
                self.transport.write(response)
        elif not cycle.response_started:
            self.transport.write(response)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()
        self.loop.call_later(LINGER, self.transport.abort)


class _HealthChecksOnly:
    """The application on connections beyond the limit."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in HEALTH_CHECKS:
            await self._app(scope, receive, send)
        else:
            await problem(_too_many())(scope, receive, send)


def _too_many() -> TemporaryError:
    return TemporaryError(
        "The server has reached its limit of open connections. Retry later.",
        code="too_many_connections",
        retry_after=5.0,
    )


def _raw(error: AtollError) -> bytes:
    """A problem document as the bytes of a complete response that closes the connection."""
    response = problem(error)
    status = HTTPStatus(response.status_code)
    lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
    lines += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*lines, b"connection: close", b"", bytes(response.body)])


_HEADER_TIMEOUT = _raw(
    InvalidRequest("The header of the request did not arrive in time.", code="request_timeout")
)
_BODY_TIMEOUT = _raw(
    InvalidRequest("The body of the request did not arrive in time.", code="request_timeout")
)
_HEADER_TOO_LARGE = _raw(
    InvalidRequest(
        f"The header of the request is larger than {MAX_HEADER} bytes.", code="header_too_large"
    )
)
TOO_MANY = _raw(_too_many())
