"""
Serves the application with uvicorn: the socket, its shutdown, and what `atoll serve` prints.

Without TLS it listens on loopback addresses only, unless the settings allow more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import os
import shlex
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from atoll.api.rest.middleware.shutdown import ShutdownResponse
from atoll.api.rest.server.http_connections import HttpConnections, HttpProtocol
from atoll.api.rest.server.listener import Listener
from atoll.api.rest.server.open_files import connection_limit
from atoll.api.ws.protocol import MAX_MESSAGE, PING_INTERVAL, WebSocketProtocol
from atoll.errors import InvalidRequest
from atoll.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from datetime import timedelta
    from pathlib import Path
    from types import FrameType

    from starlette.types import ASGIApp

    from atoll.settings import Settings


UNSENT_LIMIT = 128 * 1024
"""Bytes per connection that the kernel buffers and cannot send yet."""
_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
"""Wildcard addresses, and the loopback address of the same family."""


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run the server on a uvloop event loop."""
    # The store's threads need the interpreter for microseconds at a time. With the default
    # interval they would wait as long as a request takes.
    sys.setswitchinterval(0.0005)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def prepare(
    app: ASGIApp, settings: Settings, parent: int | None, leave: Callable[[], None]
) -> uvicorn.Server:
    """
    A server that shuts down at SIGTERM or SIGINT, even if they arrive before it serves, and lets
    running requests finish. It calls `leave` then, which ends streams that have no end of their
    own. A worker process also shuts down when `parent` becomes readable.
    """
    connections = HttpConnections(settings.connection, connection_limit(settings.connection))
    server = _Uvicorn(
        leave,
        connections,
        uvicorn.Config(
            ShutdownResponse(app),
            http=HttpProtocol,
            ws=functools.partial(WebSocketProtocol, connections=connections),  # type: ignore[arg-type]
            ws_max_size=MAX_MESSAGE,
            ws_ping_interval=PING_INTERVAL,
            ws_ping_timeout=PING_INTERVAL,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, round(connections.keep_alive)),
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=int(settings.shutdown_timeout.total_seconds()),
            ssl_certfile=_path(settings.tls_cert),
            ssl_keyfile=_path(settings.tls_key),
        ),
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    if parent is not None:
        loop.add_reader(parent, _orphaned, server, parent)
    return server


def _orphaned(server: uvicorn.Server, parent: int) -> None:
    asyncio.get_running_loop().remove_reader(parent)
    server.handle_exit(signal.SIGTERM, None)


class _Uvicorn(uvicorn.Server):
    """
    uvicorn with limited connections. Signals are handled here: uvicorn would raise them again at
    its end, before our own shutdown has finished.
    """

    def __init__(
        self, leave: Callable[[], None], connections: HttpConnections, config: uvicorn.Config
    ) -> None:
        super().__init__(config)
        self._leave = leave
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        await self.lifespan.startup()
        tls = self.config.ssl

        def make(reserved: bool, opened: Callable[[], None]) -> HttpProtocol:
            return HttpProtocol(
                config=self.config,
                server_state=self.server_state,
                app_state=self.lifespan.state,
                connections=self._connections,
                opened=opened,
                reserved=reserved,
            )

        self.servers = [
            Listener(one, self._connections, self.server_state, make, tls)  # type: ignore[misc]
            for one in sockets
        ]
        self.started = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._leave()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _path(path: Path | None) -> str | None:
    return None if path is None else str(path)


def check_exposure(settings: Settings) -> None:
    """Refuse to send keys over a network unencrypted, unless the settings allow it."""
    if settings.tls_cert is not None or settings.insecure:
        return
    try:
        loopback = ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        loopback = settings.host == "localhost"
    if not loopback:
        raise InvalidRequest(
            f"Listening on {settings.host} would send keys and code over the network unencrypted. "
            "Give --tls-cert and --tls-key, or --insecure if something else protects the network.",
            code="insecure_host",
        )


def listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Inherited by the connections: a response is one small packet, which should not wait.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Inherited too: the kernel buffers this much for a client that does not read, not megabytes.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_LIMIT)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise InvalidRequest(
            f"Cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}. "
            "Choose another --port.",
            code="address_unavailable",
        ) from None
    listener.listen(2048)
    return listener


def address(settings: Settings, port: int) -> str:
    """The URL for other nodes, as far as this machine can determine it."""
    host = settings.host
    if host in _ANY:
        host = _outgoing_address(socket.AF_INET6 if ":" in host else socket.AF_INET) or _ANY[host]
    return _url(settings, host, port)


def _outgoing_address(family: socket.AddressFamily) -> str | None:
    """The address from which this machine would send to others. Sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("2001:db8::1" if family is socket.AF_INET6 else "192.0.2.1", 9))
        except OSError:
            return None
        found: str = probe.getsockname()[0]
        return found


def _url(settings: Settings, name: str, port: int) -> str:
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{f'[{name}]' if ':' in name else name}:{port}"


def print_welcome(settings: Settings, port: int, key_file: Path | None) -> None:
    """Print the address, the place of the API key, and a command to try."""
    # A wildcard address is reached through loopback on this machine.
    url = _url(settings, _ANY.get(settings.host, settings.host), port)
    key = "$ATOLL_API_KEY" if key_file is None else f"$(cat {key_file})"
    where = "in ATOLL_API_KEY" if key_file is None else f"in {key_file}"
    lines = [
        f"Atoll {__version__} listens on {url}  (documentation: {url}/docs)",
        f"The API key is {where}. Try:",
        "",
        f'  curl -s {url}/api/v1/sessions -X POST -H "Authorization: Bearer {key}" '
        "-H 'Content-Type: application/json' -d '{}'",
        "",
    ]
    print("\n".join(lines), flush=True)  # noqa: T201 - this is what the command is asked for


def print_farewell(settings: Settings, count: int) -> None:
    """Print which sessions continue without this server, and how to end them."""
    if count == 0:
        return
    sessions = "1 session keeps" if count == 1 else f"{count} sessions keep"
    lines = [
        f"{sessions} running without this server. `atoll serve` with the same data directory takes "
        "over;",
        f"to end them: atoll gc --stop-sessions --data-dir {shlex.quote(str(settings.data_dir))}",
        "An instance ends automatically "
        f"{_duration(settings.link.unattended_grace)} after its session's end, and after "
        f"{_duration(settings.link.unattended_limit)} without a server.",
    ]
    print("\n".join(lines), flush=True)  # noqa: T201 - for who stopped the server


def _duration(time: timedelta) -> str:
    for unit, seconds in (("hour", 3600), ("minute", 60), ("second", 1)):
        count = time.total_seconds() / seconds
        if count >= 1 and count == int(count):
            return f"{int(count)} {unit}{'' if count == 1 else 's'}"
    return f"{time.total_seconds():g} seconds"
