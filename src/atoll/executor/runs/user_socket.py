"""
The socket on which user code sends requests: questions to a person, and reading messages.

`user_module/atoll_session.py` is the client. It opens a connection for each request, over an
abstract unix socket: such names belong to the sandbox's network namespace and cannot be unlinked.
The kernel reports which process connects, and so which run the request concerns.

User code is the client, so everything is bounded: connections, how often one is accepted, the
bytes of a request, and the time that a client may take to send it and to read the reply.
"""

from __future__ import annotations

import _socket
import os
import struct

from ...protocol import minijson
from ..event_loop import READ, WRITE, Loop, Timer, receive
from .run import Run
from .runs import Runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

SO_PEERCRED = 17
MAX_CONNECTIONS = 64
MAX_ACCEPTED = 100
ACCEPT_INTERVAL = 0.1
"""At most `MAX_ACCEPTED` connections are accepted in this time: PID 1 has other work."""
MAX_REQUEST = 96 * 1024
IO_TIMEOUT = 10.0
"""Seconds for a client to send its request, and to read the reply."""


class Peer:
    """One request of user code."""

    __slots__ = ("_on_leave", "finished", "out", "received", "run", "socket", "timer")

    def __init__(self, socket: _socket.socket, run: Run) -> None:
        self.socket = socket
        self.run = run
        self.received: bytearray | None = bytearray()
        """What has arrived of the request; None when it is complete."""
        self.out = b""
        self.finished = False
        """Whether `out` ends with the last reply."""
        self.timer: Timer | None = None
        self._on_leave: Callable[[], None] | None = None

    def notify_on_leave(self, callback: Callable[[], None]) -> None:
        """Have `callback` called if the client disconnects before it has read its last reply."""
        self._on_leave = callback

    def forget_callback(self) -> None:
        """The request is done; it does not matter when the client disconnects."""
        self._on_leave = None

    def left(self) -> None:
        """The connection is closed."""
        on_leave, self._on_leave = self._on_leave, None
        if on_leave is not None:
            on_leave()

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class UserSocket:
    def __init__(self, loop: Loop, runs: Runs) -> None:
        self._loop = loop
        self._runs = runs
        self._handlers: dict[str, Callable[[Peer, dict[str, Any]], None]] = {}
        self._peers: list[Peer] = []
        self._accepted = 0
        self._listener: _socket.socket | None = None

    def handle(self, operation: str, handler: Callable[[Peer, dict[str, Any]], None]) -> None:
        """Pass requests of this operation to `handler`, which replies at once or later."""
        self._handlers[operation] = handler

    def listen(self, name: str) -> None:
        self._listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind("\0" + name)
        self._listener.listen(MAX_CONNECTIONS)
        self._loop.add(self._listener.fileno(), READ, lambda mask: self._accept())

    def _accept(self) -> None:
        assert self._listener is not None
        if self._accepted == 0:
            self._loop.after(ACCEPT_INTERVAL, self._resume_accepting)
        self._accepted += 1
        if self._accepted == MAX_ACCEPTED:
            self._loop.remove(self._listener.fileno())
        try:
            fd, _ = self._listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return  # Closed before it was accepted.
        os.set_inheritable(fd, False)
        socket = _socket.socket(fileno=fd)
        socket.setblocking(False)
        pid = struct.unpack("3i", socket.getsockopt(_socket.SOL_SOCKET, SO_PEERCRED, 12))[0]
        if len(self._peers) >= MAX_CONNECTIONS:
            _reject(socket, "busy", "Too many processes are waiting for a person. Retry later.")
            return
        # 0 is a process of another PID namespace, which belongs to no run.
        run = self._runs.of_process(pid) if pid > 0 else None
        if run is None:
            _reject(socket, "no_execution", "This process belongs to no running execution.")
            return
        peer = Peer(socket, run)
        self._peers.append(peer)
        peer.timer = self._loop.after(IO_TIMEOUT, lambda: self._close(peer))
        self._loop.add(fd, READ, lambda mask: self._ready(peer, mask))

    def _resume_accepting(self) -> None:
        assert self._listener is not None
        if self._accepted >= MAX_ACCEPTED:
            self._loop.add(self._listener.fileno(), READ, lambda mask: self._accept())
        self._accepted = 0

    def _ready(self, peer: Peer, mask: int) -> None:
        if mask & WRITE:
            self._flush(peer)
        if not mask & ~WRITE or peer.socket.fileno() < 0:
            return
        data = receive(peer.socket, MAX_REQUEST)
        if data is None:
            return
        if not data or peer.received is None:
            # It has disconnected, or sends more than one request.
            self._close(peer)
            return
        peer.received += data
        if b"\n" in data:
            self._dispatch(peer, bytes(peer.received))
        elif len(peer.received) > MAX_REQUEST:
            self.error(peer, "too_large", "A request has at most %d bytes." % MAX_REQUEST)

    def _dispatch(self, peer: Peer, line: bytes) -> None:
        peer.received = None
        peer.stop_timer()
        try:
            request = minijson.loads(line)
            handler = self._handlers.get(request["op"])
            if handler is None:
                raise ValueError("unknown operation")
            handler(peer, request)
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            message = "Invalid request: %s: %s." % (type(error).__name__, error)
            self.error(peer, "bad_request", message)

    def error(self, peer: Peer, code: str, message: str) -> None:
        self.reply(peer, {"error": code, "message": message})

    def reply(self, peer: Peer, value: Any, last: bool = True) -> None:
        if peer.socket.fileno() < 0:
            return
        peer.out += minijson.dumps(value) + b"\n"
        peer.finished = last
        self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        """Send as much as the client reads now; close after the last reply."""
        try:
            while peer.out:
                peer.out = peer.out[peer.socket.send(peer.out) :]
        except BlockingIOError:
            self._loop.change(peer.socket.fileno(), READ | WRITE)
            if peer.finished:
                peer.stop_timer()
                peer.timer = self._loop.after(IO_TIMEOUT, lambda: self._close(peer))
            return
        except OSError:
            self._close(peer)
            return
        if peer.finished:
            peer.forget_callback()
            self._close(peer)
        else:
            self._loop.change(peer.socket.fileno(), READ)

    def _close(self, peer: Peer) -> None:
        if peer.socket.fileno() < 0:
            return
        peer.stop_timer()
        self._loop.remove(peer.socket.fileno())
        peer.socket.close()
        self._peers.remove(peer)
        peer.left()


def _reject(socket: _socket.socket, code: str, message: str) -> None:
    try:
        socket.send(minijson.dumps({"error": code, "message": message}) + b"\n")
    except OSError:
        pass  # The client did not wait for the reply.
    socket.close()


def number(value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError("%r is not a number" % (value,))
    return float(value)
