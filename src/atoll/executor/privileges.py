"""
Namespaces, users and capabilities of this process, for executors that are forks of a fork server.

Other executors are started by a program, such as bubblewrap, that has done this before.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import fcntl
import os
import struct

from . import syscalls

NEW_MOUNTS = 0x0002_0000
NEW_USERS = 0x1000_0000
NEW_CGROUPS, _NEW_HOST_NAME, _NEW_IPC = 0x0200_0000, 0x0400_0000, 0x0800_0000
_NEW_PROCESSES, _NEW_NETWORK = 0x2000_0000, 0x4000_0000
NEW_SANDBOX = NEW_MOUNTS | NEW_USERS | _NEW_HOST_NAME | _NEW_IPC | _NEW_PROCESSES | _NEW_NETWORK
"""Every namespace but those of control groups and clocks."""

_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_NO_SUID_DEV_EXEC = 2 | 4 | 8
_SET_INTERFACE_FLAGS, _INTERFACE_UP = 0x8914, 1
_CAPABILITY_VERSION = 0x2008_0522
_MAX_CAPABILITIES = 64


def enter_mounts(fd: int) -> None:
    """Change to the mount namespace of a descriptor."""
    syscalls.call("setns", fd, NEW_MOUNTS)


def unshare(namespaces: int) -> None:
    syscalls.call("unshare", namespaces)


def map_user(inside: int, outside: int) -> None:
    """The one user and group of a user namespace that this process has just made."""
    # The files belong to root otherwise.
    syscalls.set_dumpable(True)
    for name, text in (
        ("setgroups", b"deny"),
        ("uid_map", b"%d %d 1" % (inside, outside)),
        ("gid_map", b"%d %d 1" % (inside, outside)),
    ):
        fd = os.open("/proc/self/" + name, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text)
        finally:
            os.close(fd)


def become_user(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def mount_proc(path: str) -> None:
    """Mount the /proc of this process's namespace. Processes of others cannot."""
    syscalls.call("mount", b"proc", path.encode(), b"proc", _NO_SUID_DEV_EXEC, None)


def enable_loopback() -> None:
    """Bring up `lo` of this process's network namespace; the kernel gives it 127.0.0.1 and ::1."""
    socket = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
    try:
        request = struct.pack("16sh22x", b"lo", _INTERFACE_UP)
        fcntl.ioctl(socket.fileno(), _SET_INTERFACE_FLAGS, request)
    finally:
        socket.close()


def drop_capabilities() -> None:
    """Give up all capabilities, also those that a program could have again."""
    for capability in range(_MAX_CAPABILITIES):
        try:
            syscalls.call("prctl", _PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError:
            if capability == 0:
                raise
            break  # The kernel has no more.
    syscalls.call("prctl", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    # The seccomp filter needs this too, but not every machine has a filter.
    syscalls.call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    syscalls.call("capset", struct.pack("=Ii", _CAPABILITY_VERSION, 0), bytes(24))


def die_with_parent() -> None:
    syscalls.call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
