"""
Copies files and directory trees on the node, sharing blocks where the file system supports it.

Holes are preserved. Copies of trees preserve symbolic links, modes, times and hard links within the
tree, and leave out special files. No link is followed out of the tree, even if it changes
meanwhile. Two directories are open at a time, and memory holds only the names of subdirectories on
the current path. Blocking file work; callers use a thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING

from atoll.executor.files import permissions
from atoll.executor.files.removal import DIRECTORY

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

_FICLONE = 0x4004_9409
BLOCK = 64 * 1024 * 1024
"""Bytes that are copied between two checks of `abandoned`."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_CANNOT = frozenset(
    {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM}
)


class Abandoned(Exception):
    """The copy was cancelled."""


def share_blocks(source: int, target: int) -> bool:
    """Give the target the source's blocks; False if the file system cannot."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return False
    return True


def copy_content(source: int, target: int, size: int, abandoned: threading.Event) -> None:
    """Fill an empty file with `size` bytes of another."""
    if not size or share_blocks(source, target):
        return
    os.ftruncate(target, size)
    end = 0
    while end < size:
        try:
            start = os.lseek(source, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = min(os.lseek(source, start, os.SEEK_HOLE), size)
        _copy_range(source, target, start, end, abandoned)


def _copy_range(source: int, target: int, start: int, end: int, abandoned: threading.Event) -> None:
    copy = _copy_file_range
    while start < end:
        if abandoned.is_set():
            raise Abandoned
        try:
            done = copy(source, target, start, min(BLOCK, end - start))
        except OSError as error:
            if error.errno not in _CANNOT or copy is _sendfile:
                raise
            copy = _sendfile
            continue
        if not done:
            return  # The file was truncated meanwhile.
        start += done


def _copy_file_range(source: int, target: int, start: int, count: int) -> int:
    return os.copy_file_range(source, target, count, start, start)


def _sendfile(source: int, target: int, start: int, count: int) -> int:
    os.lseek(target, start, os.SEEK_SET)
    return os.sendfile(target, source, start, count)


@contextlib.contextmanager
def _ignoring(*numbers: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


class TreeCopy:
    def __init__(
        self, source: int, target: int, uid: int | None, links: int, abandoned: threading.Event
    ) -> None:
        """
        `source` and `target` are descriptors of directories, the latter empty. `uid` owns all
        copies. `links` is an empty directory on the target's file system for names of files with
        hard links; the caller removes it.
        """
        self._from = os.dup(source)
        self._to = os.dup(target)
        self._uid = uid
        self._links = links
        self._abandoned = abandoned
        self._path: list[tuple[os.stat_result, int, list[str]]] = []
        """The current path: status, mode to restore, and subdirectories still to copy."""

    def run(self) -> None:
        try:
            self._path.append((os.fstat(self._from), -1, self._fill()))
            while self._path:
                ahead = self._path[-1][2]
                if ahead:
                    self._enter(ahead.pop())
                else:
                    self._leave()
        finally:
            with contextlib.suppress(OSError):
                self._restore_modes()
            os.close(self._from)
            os.close(self._to)

    def _restore_modes(self) -> None:
        """After an error: restore the modes of directories on the current path."""
        while self._path:
            _, mode, _ = self._path.pop()
            above = os.open("..", DIRECTORY, dir_fd=self._from)
            permissions.close(self._from, mode)
            self._from = above

    def _fill(self) -> list[str]:
        """Copy the files of the current directory; returns the names of its subdirectories."""
        names = []
        with os.scandir(self._from) as items:
            for item in items:
                if self._abandoned.is_set():
                    raise Abandoned
                if item.is_dir(follow_symlinks=False):
                    names.append(item.name)
                else:
                    self._copy_entry(item.name)
        return names

    def _copy_entry(self, name: str) -> None:
        try:
            status = os.stat(name, dir_fd=self._from, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(name, dir_fd=self._from), name, dir_fd=self._to)
            self._own(name)
            times = (status.st_atime_ns, status.st_mtime_ns)
            os.utime(name, ns=times, dir_fd=self._to, follow_symlinks=False)
        elif stat.S_ISREG(status.st_mode):
            key = f"{status.st_dev:x}-{status.st_ino:x}"
            if status.st_nlink > 1 and self._link(key, name):
                return
            self._copy_file(name)
            if status.st_nlink > 1:
                with _ignoring(errno.EMLINK, errno.EEXIST):
                    os.link(name, key, src_dir_fd=self._to, dst_dir_fd=self._links)

    def _link(self, key: str, name: str) -> bool:
        """Link to the copy made under another name; False if there is none, or it has too many."""
        with _ignoring(errno.ENOENT, errno.EMLINK):
            os.link(key, name, src_dir_fd=self._links, dst_dir_fd=self._to)
            return True
        return False

    def _copy_file(self, name: str) -> None:
        source, mode = permissions.open_for_reading(name, self._from)
        try:
            status = os.fstat(source)
            if not stat.S_ISREG(status.st_mode):
                return  # It was replaced meanwhile.
            target = os.open(name, _NEW, 0o600, dir_fd=self._to)
            try:
                copy_content(source, target, status.st_size, self._abandoned)
                if self._uid is not None:
                    os.fchown(target, self._uid, self._uid)
                os.fchmod(target, stat.S_IMODE(status.st_mode) if mode < 0 else mode)
                os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
            finally:
                os.close(target)
        finally:
            permissions.close(source, mode)

    def _own(self, name: str) -> None:
        if self._uid is not None:
            os.chown(name, self._uid, self._uid, dir_fd=self._to, follow_symlinks=False)

    def _enter(self, name: str) -> None:
        try:
            below, mode = permissions.open_directory(name, self._from)
        except (FileNotFoundError, NotADirectoryError):
            return  # It was replaced meanwhile.
        status = os.fstat(below)
        os.close(self._from)
        self._from = below
        self._path.append((status, mode, []))
        os.mkdir(name, 0o700, dir_fd=self._to)
        inside = os.open(name, DIRECTORY, dir_fd=self._to)
        os.close(self._to)
        self._to = inside
        self._path[-1] = (status, mode, self._fill())

    def _leave(self) -> None:
        status, mode, _ = self._path.pop()
        below, made = self._from, self._to
        if self._path:
            above = self._path[-1][0]
            self._from = os.open("..", DIRECTORY, dir_fd=below)
            self._to = os.open("..", DIRECTORY, dir_fd=made)
            found = os.fstat(self._from)
            if (found.st_dev, found.st_ino) != (above.st_dev, above.st_ino):
                raise OSError(errno.ESTALE, "the tree was moved while it was copied")
        else:
            self._from, self._to = os.dup(below), os.dup(made)
        permissions.close(below, mode)
        if self._uid is not None:
            os.fchown(made, self._uid, self._uid)
        os.fchmod(made, stat.S_IMODE(status.st_mode) if mode < 0 else mode)
        os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.close(made)
