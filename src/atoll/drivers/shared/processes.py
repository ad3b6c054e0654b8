"""Host processes by pid and start time, so that a pid used again is never taken for the old one."""

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
    Clock ticks since boot at which the process began; none when it is not there, or is a zombie.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def kill(pid: int, started: int, number: int = signal.SIGKILL) -> None:
    """A signal to just this process; nothing when it is gone."""
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
    """Whether just this process ended in that time; also true when it is gone."""
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
    Have the kernel write all it holds of the file system that a process sees at a directory of its
    root; the process itself need not run.
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
    """Have the kernel write all it holds of the file system that a descriptor is of."""
    if _libc.syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
