"""What is mounted beneath a directory of the node, and how it is unmounted."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from atoll.drivers.shared import mount_syscalls
from atoll.errors import TemporaryError


def mount_points(beneath: Path) -> list[str]:
    """Mount points below a directory in this process's mount namespace, the last one first."""
    prefix = f"{beneath}/"
    with open("/proc/self/mountinfo", "rb") as file:
        found = [os.fsdecode(mount_syscalls.unescaped(line.split()[4])) for line in file]
    return [path for path in reversed(found) if path.startswith(prefix)]


def unmount(path: Path) -> None:
    """Unmount everything at this path; busy mounts end when their last file is closed."""
    for flags in (0, mount_syscalls.MNT_DETACH):
        while mount_syscalls.libc.umount2(os.fsencode(path), flags) == 0:
            continue
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOENT):
            return
    raise TemporaryError(
        f"{path} could not be unmounted: {os.strerror(number)}.", code="volume_busy"
    )


def unmount_all(node: Path) -> None:
    """Unmount everything below a node's directory, before that is removed."""
    for path in mount_points(node):
        unmount(Path(path))
