"""
Relay: forwards between the executor's socket and this process's standard streams.

It carries the link of an instance whose socket cannot be reached from outside; the control plane
owns the standard streams. It runs as a user of its own in the instance, so that user code can
neither signal, trace nor impersonate it. It buffers only one read in each direction, so a slow end
slows the other. It exits when either end closes.

The control plane starts this module by its name, also in containers that an earlier version has
started: the name is part of the protocol.
"""

from __future__ import annotations

import _socket
import os
import select
import struct
import sys

from . import bundle_import

SCM_CREDENTIALS = 2
GREETING = b"\n"
"""The message that carries this process's credentials."""
BUFFER_SIZE = 262_144
EXIT_FAILED = 71
MAX_ATTEMPTS, RETRY_DELAY = 1000, 0.01
"""Attempts to connect: user code may have filled the queue of the executor's socket."""


class Direction:
    """Copies from one descriptor to another."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.target = target
        self.buffer = memoryview(b"")
        self.over = False
        """Whether the source has ended or the target is closed."""

    def move(self) -> None:
        """Copy as much as possible without blocking."""
        try:
            if not self.buffer:
                piece = os.read(self.source, BUFFER_SIZE)
                self.over = not piece
                self.buffer = memoryview(piece)
            if self.buffer:
                self.buffer = self.buffer[os.write(self.target, self.buffer) :]
        except BlockingIOError:
            pass
        except OSError:
            self.buffer, self.over = memoryview(b""), True


def copy(*directions: Direction) -> None:
    """Copy until one direction ends, and write everything that it has read."""
    while not any(direction.over for direction in directions):
        sources = [direction.source for direction in directions if not direction.buffer]
        targets = [direction.target for direction in directions if direction.buffer]
        readable, writable, _ = select.select(sources, targets, [])
        for direction in directions:
            if direction.target in writable if direction.buffer else direction.source in readable:
                direction.move()


def connect(socket: _socket.socket, name: bytes) -> None:
    """
    Waits for an executor that is starting, which ends with this process if it fails. Retries while
    the queue is full: gVisor refuses a connection then, Linux waits.
    """
    attempts = 0
    while attempts < MAX_ATTEMPTS:
        try:
            socket.connect(name)
            return
        except ConnectionRefusedError:
            pass
        except BlockingIOError:
            attempts += 1
        select.select([], [], [], RETRY_DELAY)
    raise OSError("the queue of the socket is full")


def main() -> None:
    bundle_import.remove()
    socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connect(socket, b"\0" + os.fsencode(sys.argv[1]))
        who = struct.pack("3i", os.getpid(), os.getuid(), os.getgid())
        socket.sendmsg([GREETING], [(_socket.SOL_SOCKET, SCM_CREDENTIALS, who)])
    except OSError as error:
        os.write(2, b"atoll: the executor cannot be reached: %s\n" % str(error).encode())
        os._exit(EXIT_FAILED)
    for fd in (0, 1, socket.fileno()):
        os.set_blocking(fd, False)
    copy(Direction(0, socket.fileno()), Direction(socket.fileno(), 1))
    os._exit(0)
