"""
Jobs: how the supervisor hands work to a process, with the descriptors that belong to it.

A job travels in one message on a socket. Its sender learns which process took it from `taken`.
"""

from __future__ import annotations

import _socket
import os
import struct
from _socket import MSG_CMSG_CLOEXEC as CLOSE_ON_EXEC
from _socket import SCM_RIGHTS
from marshal import dumps, loads
from os import getpid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TAKEN = struct.Struct("!Qi")  # job number, pid
JOB = struct.Struct("!Q")
INLINE_JOB = 64 * 1024
DESCRIPTOR = struct.Struct("i")
MAX_MESSAGE = 128 * 1024
DESCRIPTORS_SPACE = _socket.CMSG_SPACE(8 * DESCRIPTOR.size)


def receive(jobs: _socket.socket, announce: bool = False) -> tuple[int, dict[str, Any], list[int]]:
    """
    Wait for a job: its number, its description and the descriptors that came with it. With
    `announce`, report to the supervisor that this process took it.
    """
    data, ancillary, _, _ = jobs.recvmsg(
        # Close-on-exec: programs that the run starts inherit only 0, 1 and 2.
        MAX_MESSAGE,
        DESCRIPTORS_SPACE,
        CLOSE_ON_EXEC,
    )
    descriptors: list[int] = []
    for _, kind, body in ancillary:
        if kind == SCM_RIGHTS:
            descriptors += [fd for (fd,) in DESCRIPTOR.iter_unpack(body)]
    if not data:
        os._exit(0)  # The supervisor has exited, which ends the namespace.
    (number,) = JOB.unpack_from(data)
    body = data[JOB.size :]
    if announce:
        jobs.send(TAKEN.pack(number, getpid()))
    if not body:
        # Too large for a message: the last descriptor leads to it.
        with open(descriptors.pop(), "rb") as file:
            file.seek(0)
            body = file.read()
    return number, loads(body), descriptors  # noqa: S302 - written by our own supervisor


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
    body = dumps(job)
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
