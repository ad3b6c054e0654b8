"""Processes of instances, from outside: found by pid and start time, signalled, cut off."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

from atoll.drivers.kubernetes.pod_manifest import PORT

PIDFD_GETFD = 438
"""The system call, by the number that it has everywhere but on Alpha."""


def started(pid: int) -> int | None:
    """Start time of a process in ticks since boot; null if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def send(pid: int, began: int, number: int) -> bool:
    """Signal only this process; returns whether it existed."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if started(pid) != began:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def zygote_of(init: int) -> tuple[int, int] | None:
    """Pid and start of an executor's zygote."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for pid in Path(f"/proc/{init}/task/{init}/children").read_text().split():
            if Path(f"/proc/{pid}/comm").read_text().strip() == "zygote":
                began = started(int(pid))
                return None if began is None else (int(pid), began)
    return None


def cut_links(init: int) -> int:
    """End all connections of an executor, as a network would; how many there were."""
    try:
        descriptor = os.pidfd_open(init)
    except ProcessLookupError:
        return 0
    cut = 0
    try:
        for entry in os.listdir(f"/proc/{init}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{init}/fd/{entry}").startswith("socket:"):
                    cut += _cut(descriptor, int(entry))
    except (FileNotFoundError, PermissionError):
        pass
    finally:
        os.close(descriptor)
    return cut


def _is_link(address: object) -> bool:
    """Whether a socket with this address of its own is one of an executor."""
    match address:
        case (_, int(port), *_):
            return port == PORT
        case _:
            return str(address).endswith("link.sock")


def _cut(process: int, number: int) -> bool:
    """Shut a connection to the executor's address down; not what it has with its zygote."""
    fd = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, number, 0)
    if fd < 0:
        return False
    with socket.socket(fileno=fd) as taken:
        listens = taken.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens or not _is_link(taken.getsockname()):
            return False
        taken.shutdown(socket.SHUT_RDWR)
    return True
