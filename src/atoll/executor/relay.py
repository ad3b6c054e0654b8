"""
The link of an instance that has no socket outside: between PID 1 and this process's standard
streams, which are the control plane's.

It runs as a user of its own in the instance, so that user code can neither signal it, nor trace it,
nor pass for it. Of each direction no more is held than was read at once, so whoever is slow slows
the other end. It ends when either end does.
"""

from __future__ import annotations

import _socket
import os
import select
import struct
import sys

SCM_CREDENTIALS = 2
GREETING = b"\n"
"""The message that bears our credentials."""
PIECE = 262_144
FAILED = 71
TRIES, PAUSE = 1000, 0.01
"""For a place in the queue of the executor's socket, which user code may have filled."""


class Way:
    """One direction."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.target = target
        self.held = memoryview(b"")
        self.over = False
        """Whether nothing more comes, or nobody takes it."""

    def move(self) -> None:
        """As much as goes without waiting."""
        try:
            if not self.held:
                piece = os.read(self.source, PIECE)
                self.over = not piece
                self.held = memoryview(piece)
            if self.held:
                self.held = self.held[os.write(self.target, self.held) :]
        except BlockingIOError:
            pass
        except OSError:
            self.held, self.over = memoryview(b""), True


def copy(*ways: Way) -> None:
    """Until one of them is over: what that has read before is written by then."""
    while not any(way.over for way in ways):
        sources = [way.source for way in ways if not way.held]
        targets = [way.target for way in ways if way.held]
        readable, writable, _ = select.select(sources, targets, [])
        for way in ways:
            if way.target in writable if way.held else way.source in readable:
                way.move()


def connect(socket: _socket.socket, name: bytes) -> None:
    """Linux waits while the queue is full; gVisor refuses."""
    for _ in range(TRIES):
        try:
            socket.connect(name)
            return
        except BlockingIOError:
            select.select([], [], [], PAUSE)
    raise OSError("too many connections wait for it")


def main() -> None:
    socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connect(socket, b"\0" + os.fsencode(sys.argv[1]))
        who = struct.pack("3i", os.getpid(), os.getuid(), os.getgid())
        socket.sendmsg([GREETING], [(_socket.SOL_SOCKET, SCM_CREDENTIALS, who)])
    except OSError as error:
        os.write(2, b"atoll: the executor is not reached: %s\n" % str(error).encode())
        os._exit(FAILED)
    for fd in (0, 1, socket.fileno()):
        os.set_blocking(fd, False)
    copy(Way(0, socket.fileno()), Way(socket.fileno(), 1))
    os._exit(0)
