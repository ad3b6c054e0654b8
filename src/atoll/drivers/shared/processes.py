"""Host processes, identified by pid and start time because pids are reused."""

from __future__ import annotations

import ctypes
import os
import select
import signal
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    return BOOT_ID.read_text().strip()


def start_time(pid: int) -> int | None:
    """
    Clock ticks since boot at which the process started; None if it has ended or is a zombie.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def kill(pid: int, started: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to this process, if it still runs."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if start_time(pid) == started:
            signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return
    finally:
        os.close(fd)


def wait(pid: int, started: int, seconds: float) -> bool:
    """Wait for the end of this process; False if it has not ended after `seconds`."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if start_time(pid) != started:
            return True
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(fd)


def namespace_pid(pid: int) -> int | None:
    """A process's pid in its innermost namespace."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except (FileNotFoundError, ProcessLookupError):
        pass
    return None


def sync_files(pid: int, directory: str) -> None:
    """
    Flush the file system that a process has mounted at a directory of its root. The process may be
    frozen.
    """
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(directory, flags, dir_fd=root)
    finally:
        os.close(root)
    try:
        sync_file_system(fd)
    finally:
        os.close(fd)


def sync_file_system(fd: int) -> None:
    """Flush the file system of a descriptor to disk."""
    if _libc.syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
