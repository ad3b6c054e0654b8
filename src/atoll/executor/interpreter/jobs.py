"""
Jobs: how the supervisor hands work to a process, with the descriptors that belong to it.

A job travels in one message on a socket. Its sender learns which process took it from `taken`.
"""

from __future__ import annotations

import _socket
import marshal
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

TAKEN = struct.Struct("!Qi")  # job number, pid
JOB = struct.Struct("!Q")
INLINE_JOB = 64 * 1024
MAX_MESSAGE = 128 * 1024


def receive_and_announce(jobs: _socket.socket) -> tuple[int, dict[str, Any], list[int]]:
    """Wait for a job and report to the supervisor which process took it."""
    return receive(jobs, lambda number: jobs.send(TAKEN.pack(number, os.getpid())))


def receive(
    jobs: _socket.socket, announce: Callable[[int], object] = lambda number: None
) -> tuple[int, dict[str, Any], list[int]]:
    """Wait for a job: its number, its description and the descriptors that came with it."""
    data, ancillary, _, _ = jobs.recvmsg(
        # Close-on-exec: programs that the run starts inherit only 0, 1 and 2.
        MAX_MESSAGE,
        _socket.CMSG_SPACE(8 * 4),
        _socket.MSG_CMSG_CLOEXEC,
    )
    descriptors: list[int] = []
    for level, kind, body in ancillary:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            descriptors += struct.unpack("%di" % (len(body) // 4), body[: len(body) // 4 * 4])
    if not data:
        os._exit(0)  # The supervisor has exited, which ends the namespace.
    (number,) = JOB.unpack_from(data)
    body = data[JOB.size :]
    announce(number)
    if not body:
        # Too large for a message: the last descriptor leads to it.
        with open(descriptors.pop(), "rb") as file:
            file.seek(0)
            body = file.read()
    return number, marshal.loads(body), descriptors  # noqa: S302 - written by our own supervisor


def taken(jobs: _socket.socket) -> list[tuple[int, int]]:
    """
    The jobs that were taken since the last call: the number of each, and the pid that took it.
    """
    found: list[tuple[int, int]] = []
    while True:
        try:
            message = jobs.recv(TAKEN.size)
        except OSError:
            return found
        if not message:
            return found
        if len(message) == TAKEN.size:
            found.append(TAKEN.unpack(message))


def recall(jobs: _socket.socket) -> list[tuple[int, int]]:
    """
    Withdraw all jobs that no process has taken; returns `taken`. A process that receives a job
    afterwards cannot announce it, and ends.
    """
    jobs.shutdown(_socket.SHUT_RD)
    return taken(jobs)


def send(jobs: _socket.socket, number: int, job: dict[str, Any], descriptors: list[int]) -> None:
    """Queue a job for the next spare child. Raises BlockingIOError if the queue is full."""
    # Not JSON: parsing it would touch more of the child's memory than the rest of this exchange.
    body = marshal.dumps(job)
    spill = -1
    if len(body) > INLINE_JOB:
        spill = os.memfd_create("job", os.MFD_CLOEXEC)
        view = memoryview(body)
        while view:
            view = view[os.write(spill, view) :]
        body = b""
    fds = descriptors if spill < 0 else [*descriptors, spill]
    try:
        jobs.sendmsg(
            [JOB.pack(number), body],
            [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack("%di" % len(fds), *fds))],
        )
    finally:
        if spill >= 0:
            os.close(spill)
