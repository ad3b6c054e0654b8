"""
The kernel's mount interface: file system images, read-only views, and mounts with mapped owners.

Standard library alone, because the spawner imports it. It is a program as well, for what needs a
process of its own: a trial mount, which leaves no trace, and the mapping of owners, which forks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys

TRY_IMAGE = "try-image"
"""
Program argument, followed by an image and a directory: check that the image can be mounted there.
Two uids may follow: mount it such that files of the first belong to the second.
"""
MAP_OWNER = "map-owner"
"""
Program argument, followed by a mount point and two uids: mount it again such that files of the
first uid belong to the second.
"""

_CLONE_NEWNS, _CLONE_NEWUSER = 0x0002_0000, 0x1000_0000
# The same numbers on every machine.
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MOUNT_ATTR_IDMAP = 1, 4, 0x0010_0000
READ_ONLY, NO_SETUID, NO_DEVICES = 1, 2, 4
"""Attributes of mounts."""
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_NOATIME = 1, 2, 4, 8, 32, 1024
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_LO_AUTOCLEAR, _LO_DIRECT_IO = 4, 16

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    result = libc.mount(
        source.encode(),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode() if options else None,
    )
    check(result, f"mounting {source} on {target}")


def _attach_loop(image: str) -> tuple[str, int]:
    """
    A loop device for the image. The kernel frees it after its last user, so keep the descriptor
    until it is mounted.
    """
    with open(image, "r+b", buffering=0) as backing, open("/dev/loop-control", "rb") as control:
        for _ in range(64):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            path = f"/dev/loop{number}"
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            for flags in (_LO_AUTOCLEAR | _LO_DIRECT_IO, _LO_AUTOCLEAR):
                info = struct.pack("=5Q4I64s64s32s2Q", *[0] * 8, flags, b"", b"", b"", 0, 0)
                config = struct.pack("=2I", backing.fileno(), 4096) + info + bytes(64)
                try:
                    fcntl.ioctl(device, _LOOP_CONFIGURE, config)
                    return path, device
                except OSError as error:
                    if error.errno == errno.EBUSY:
                        break  # Another process was faster; try the next one.
                    if error.errno != errno.EINVAL:
                        os.close(device)
                        raise
            os.close(device)
    raise OSError(errno.EBUSY, "no loop device is free")


def own_mounts() -> None:
    check(libc.unshare(_CLONE_NEWNS), "unshare")
    mount("none", "/", None, MS_REC | MS_PRIVATE)


def mount_image(image: str, target: str) -> None:
    device, keep = _attach_loop(image)
    try:
        mount_device(device, target)
    finally:
        os.close(keep)


def mount_mapped(image: str, target: str, owner: int, uid: int) -> None:
    """
    Like `mount_image`, but files of `owner` in the image belong to `uid` below the mount point.
    """
    mount_image(image, target)
    map_owner(target, owner, uid)


def map_owner(target: str, owner: int, uid: int) -> None:
    """Remount a mount point, so that files of `owner` belong to `uid`."""
    users = _mapping(owner, uid)
    try:
        tree = clone_mount(target)
        try:
            check(libc.umount2(os.fsencode(target), MNT_DETACH), f"unmounting {target}")
            _set_attributes(tree, b"", _AT_EMPTY_PATH, _MOUNT_ATTR_IDMAP, users)
            attach(tree, target)
        finally:
            os.close(tree)
    finally:
        os.close(users)


def clone_mount(path: str, *, recursive: bool = False) -> int:
    """A descriptor of a copy of what is mounted at a path, attached nowhere."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    tree = libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(path), ctypes.c_uint(flags))
    check(min(tree, 0), f"taking {path}")
    return int(tree)


def attach(tree: int, target: str) -> None:
    """Mount what `clone_mount` has returned."""
    path = os.fsencode(target)
    done = libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, path, _MOVE_MOUNT_F_EMPTY_PATH)
    check(done, f"mounting on {target}")


def restrict_tree(tree: int, attributes: int) -> None:
    """Add attributes to all mounts of what `clone_mount` has returned."""
    _set_attributes(tree, b"", _AT_EMPTY_PATH | _AT_RECURSIVE, attributes)


def restrict(path: str, attributes: int, *, recursive: bool = False) -> None:
    """Add attributes to the mount at a path."""
    _set_attributes(_AT_FDCWD, os.fsencode(path), _AT_RECURSIVE * recursive, attributes)


def _set_attributes(where: int, path: bytes, flags: int, added: int, users: int = 0) -> None:
    attributes = struct.pack("=4Q", added, 0, 0, users)
    size = ctypes.c_size_t(len(attributes))
    done = libc.syscall(_MOUNT_SETATTR, where, path, ctypes.c_uint(flags), attributes, size)
    check(done, f"changing the mount {os.fsdecode(path)}")


def pivot_root(new: str, old: str) -> None:
    check(libc.pivot_root(os.fsencode(new), os.fsencode(old)), f"changing the root to {new}")


def _mapping(inside: int, outside: int) -> int:
    """
    A descriptor of a user namespace that maps one uid and gid to another. Root is mapped to itself,
    because gVisor creates files as root and changes their owner afterwards.
    """
    ready, began = os.pipe2(os.O_CLOEXEC)
    over, end = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(end)
        if libc.unshare(_CLONE_NEWUSER) == 0:
            os.write(began, b"1")
        os.close(began)
        os.read(over, 1)
        os._exit(0)
    os.close(began)
    os.close(over)
    try:
        if not os.read(ready, 1):
            raise OSError(errno.EPERM, "cannot create a user namespace")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(f"{inside} {outside} 1\n0 0 1\n")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready)
        os.close(end)
        os.waitpid(pid, 0)


def mount_view(source: str, target: str) -> None:
    """A directory at another place, where it is read-only, without devices and setuid."""
    mount(source, target, None, MS_BIND)
    flags = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV
    mount("none", target, None, flags)


def mount_device(device: str, target: str) -> None:
    mount(device, target, "ext4", MS_NOSUID | MS_NODEV | MS_NOATIME, "discard")


def unescaped(path: bytes) -> bytes:
    """A path as the kernel lists it: blanks and the like are in octal there."""
    head, *parts = path.split(b"\\")
    return head + b"".join(bytes([int(part[:3], 8)]) + part[3:] for part in parts)


def main() -> None:
    command, *arguments = sys.argv[1:]
    try:
        if command == MAP_OWNER:
            map_owner(arguments[0], int(arguments[1]), int(arguments[2]))
            return
        # In a mount namespace of this process: the mount ends with it.
        own_mounts()
        image, directory, *users = arguments
        if users:
            mount_mapped(image, directory, *map(int, users))
        else:
            mount_image(image, directory)
    except OSError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
