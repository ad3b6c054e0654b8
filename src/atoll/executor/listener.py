"""
Accepts connections of control planes and refuses those of user code.

By default a connection must come from outside the PID namespace. With `peer` it must come from that
user: its first message carries the sender's credentials, which the kernel has checked. The kernel
knows no sender of a TCP connection; there only TLS and the token tell who connects (`tls`).
"""

from __future__ import annotations

import _socket
import os
import struct

from .event_loop import READ, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

SO_PASSCRED, SO_PEERCRED = 16, 17
SCM_RIGHTS, SCM_CREDENTIALS = 1, 2
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
MAX_UNVERIFIED = 16
"""Connections at a time whose user is not known yet."""
BACKLOG = 64


class Listener:
    def __init__(
        self,
        loop: Loop,
        peer: int | None,
        admit: Callable[[_socket.socket], None],
        *,
        loopback: bool = False,
    ) -> None:
        """`loopback` admits connections over TCP from this network namespace."""
        self._loopback = loopback
        self._loop = loop
        self._peer = peer
        self._admit = admit
        self._unverified: dict[int, _socket.socket] = {}

    def listen(self, listener: _socket.socket) -> None:
        listener.setblocking(False)
        self._loop.add(listener.fileno(), READ, lambda mask: self._accept(listener))

    def _accept(self, listener: _socket.socket) -> None:
        try:
            fd, _ = listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return  # Closed before it was accepted.
        socket = _socket.socket(fileno=fd)
        socket.setblocking(False)
        os.set_inheritable(fd, False)
        if socket.family != _socket.AF_UNIX:
            # From inside only user code connects, unless the API server forwards the port.
            if self._loopback or not _is_local(socket):
                self._admit(socket)
            else:
                socket.close()
            return
        pid, uid, _ = _peer_credentials(socket)
        if self._peer is not None:
            # Not every kernel reports the peer of a connection: gVisor reports this process.
            if uid != self._peer and pid != os.getpid():
                socket.close()
            else:
                self._await_credentials(socket)
        elif os.getpid() == 1 and pid != 0:
            # A peer with a pid in this namespace is one of its own processes.
            socket.close()
        else:
            self._admit(socket)

    def _await_credentials(self, socket: _socket.socket) -> None:
        socket.setsockopt(_socket.SOL_SOCKET, SO_PASSCRED, 1)
        while len(self._unverified) >= MAX_UNVERIFIED:
            self._remove(next(iter(self._unverified))).close()
        self._unverified[socket.fileno()] = socket
        self._loop.add(socket.fileno(), READ, lambda mask: self._verify(socket))

    def _verify(self, socket: _socket.socket) -> None:
        self._remove(socket.fileno())
        if _sender(socket) != self._peer:
            socket.close()
            return
        socket.setsockopt(_socket.SOL_SOCKET, SO_PASSCRED, 0)
        self._admit(socket)

    def _remove(self, fd: int) -> _socket.socket:
        self._loop.remove(fd)
        return self._unverified.pop(fd)


def _is_local(socket: _socket.socket) -> bool:
    """Whether a connection comes from this network namespace."""
    try:
        peer, own = str(socket.getpeername()[0]), str(socket.getsockname()[0])
        # The kernel chooses the same address for both ends, unless a loopback address was bound.
        return peer == own or peer.startswith(("127.", "::1", "::ffff:127."))
    except OSError:
        return True  # It is closed already.


def _peer_credentials(socket: _socket.socket) -> tuple[int, int, int]:
    found = socket.getsockopt(_socket.SOL_SOCKET, SO_PEERCRED, CREDENTIALS.size)
    pid, uid, gid = CREDENTIALS.unpack(found)
    return pid, uid, gid


def _sender(socket: _socket.socket) -> int:
    """The user whose credentials came with the first byte; -1 if there are none."""
    uid = -1
    try:
        _, ancillary, _, _ = socket.recvmsg(1, _socket.CMSG_SPACE(CREDENTIALS.size))
        for _, kind, data in ancillary:
            if kind == SCM_CREDENTIALS:
                uid = CREDENTIALS.unpack(data)[1]
            elif kind == SCM_RIGHTS:
                for (fd,) in struct.iter_unpack("i", data):
                    os.close(fd)
    except (OSError, struct.error):
        pass
    return uid


def open_listener(config: dict[str, Any]) -> _socket.socket:
    """
    The socket that the driver passed in, or a new one at the configured address: a path, or the
    number of a TCP port.
    """
    if "listen_fd" in config:
        return _socket.socket(fileno=config["listen_fd"])
    if isinstance(config["listen"], int):
        listener = _bound_to_port(config["listen"])
        # Connections inherit it. Otherwise a result waits for the acknowledgement of the output.
        listener.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
    else:
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        listener.bind(config["listen"])
    listener.listen(BACKLOG)
    return listener


def _bound_to_port(port: int) -> _socket.socket:
    """For IPv6 and IPv4; for IPv4 alone if the kernel has no other."""
    try:
        listener = _socket.socket(_socket.AF_INET6, _socket.SOCK_STREAM)
        listener.setsockopt(_socket.IPPROTO_IPV6, _socket.IPV6_V6ONLY, 0)
        listener.bind(("::", port))
    except OSError:
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        listener.bind(("0.0.0.0", port))  # noqa: S104 - that of its own network namespace
    return listener
