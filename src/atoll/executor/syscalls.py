"""System calls that Python's `os` does not offer."""

from __future__ import annotations

import _ctypes
import _signal as signal  # type: ignore[import-not-found]
import array
import os
import struct
import sys
from _ctypes import call_function

_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SFD_FLAGS = 0o2004000  # non-blocking, close-on-exec
_SI_USER = 0

# `_ctypes` and not `ctypes`: the package needs more memory than the whole executor, and a child
# that calls through it touches more pages.
_library = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
_prctl_address = _ctypes.dlsym(_library, "prctl")


def _prctl(option: int, value: object) -> None:
    if call_function(_prctl_address, (option, value, 0, 0, 0)) != 0:
        raise OSError("prctl %d failed" % option)


def call(function: str, *arguments: object) -> None:
    """Call a function of the C library that returns 0, or something else if it fails."""
    if call_function(_ctypes.dlsym(_library, function), arguments) != 0:
        raise OSError("%s failed" % function)


def set_dumpable(dumpable: bool) -> None:
    """
    A process that is not dumpable cannot be traced, and its /proc files are closed to its peers.
    """
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def set_subreaper() -> None:
    """
    Orphaned descendants become children of this process, so none leaves its tree. With a kernel
    that does not support this, such as gVisor, they become children of PID 1: strays.
    """
    try:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    except OSError:
        pass


def set_name(name: str) -> None:
    _prctl(_PR_SET_NAME, name.encode()[:15])


def install_filter(program: bytes) -> None:
    """
    Install a seccomp filter (a BPF program) for this process and all that it starts from now on,
    in addition to filters that are installed already.
    """
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    code = array.array("B", program)
    described = struct.pack("HP", len(program) // 8, code.buffer_info()[0])
    if call_function(_prctl_address, (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described)):
        raise OSError("the seccomp filter could not be installed")


def set_oom_score(score: int) -> None:
    """For this process and those that it starts. Ignored by kernels that do not support it."""
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.write(fd, b"%d" % score)
    finally:
        os.close(fd)


def ipc_control(function: str, number: int, command: int) -> tuple[int, bytes]:
    """
    Call `shmctl`, `msgctl` or `semctl` for an object or an index of this IPC namespace. Returns the
    call's result and the buffer that it has filled.
    """
    # The kernel writes into a bytes object that nothing else refers to: `ctypes`, which has a type
    # for buffers, is large.
    filled = bytes(256)
    arguments = (number, 0) if function == "semctl" else (number,)
    address = _ctypes.dlsym(_library, function)
    done = int(call_function(address, (*arguments, command, filled)))
    return done, filled


def signal_descriptor(number: int) -> int:
    """
    A descriptor from which a blocked signal is read. Unlike a handler it can tell signals from
    outside the namespace from those of a process inside; see `is_from_outside`.
    """
    mask = (1 << (number - 1)).to_bytes(8, sys.byteorder)
    address = _ctypes.dlsym(_library, "signalfd")
    fd = int(call_function(address, (-1, mask, _SFD_FLAGS)))
    if fd < 0:
        raise OSError("signalfd failed")
    return fd


def is_from_outside(message: bytes) -> bool:
    """
    Whether a process of another namespace sent a signal by `kill`. The pid alone is no proof: with
    `sigqueue` the sender chooses it, but cannot use the code of `kill`.
    """
    code, pid = struct.unpack_from("=iI", message, 8)
    return bool(code == _SI_USER and pid == 0)


def inotify() -> int:
    """A new inotify descriptor; -1 if the kernel has no inotify."""
    try:
        address = _ctypes.dlsym(_library, "inotify_init1")
    except OSError:
        return -1
    return int(call_function(address, (_SFD_FLAGS,)))


def inotify_add(fd: int, path: bytes, mask: int) -> int:
    """The number of a new watch; -1 if it cannot be added."""
    address = _ctypes.dlsym(_library, "inotify_add_watch")
    return int(call_function(address, (fd, path, mask)))


def inotify_remove(fd: int, number: int) -> None:
    call_function(_ctypes.dlsym(_library, "inotify_rm_watch"), (fd, number))


def sync_files(fd: int) -> None:
    """Write all cached data of a file system to disk, however long that takes."""
    if call_function(_ctypes.dlsym(_library, "syncfs"), (fd,)) != 0:
        raise OSError("syncfs failed")


def become_helper(name: str, *kept: int) -> None:
    """
    Turn a fork of PID 1 into a process of this name that has none of its signal handlers, and of
    its descriptors only the standard streams and `kept`. Like PID 1 it is not dumpable.
    """
    set_name(name)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    close_descriptors_except(0, 1, 2, *kept)


def close_descriptors_except(*kept: int) -> None:
    low = -1
    for fd in [*sorted(kept), 65536]:
        if fd > low + 1:  # Some versions of closerange do not take an empty range.
            os.closerange(low + 1, fd)
        low = fd
