"""
The workspace's files, as the control plane reads and changes them.

Every path is opened component by component beneath the workspace, and no component may be a link by
then, so no name leads out of it: not `..`, not a symbolic link, not a race. Links that stay inside
work. Neither memory nor stack depends on the size or depth of a tree.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from ...protocol import minijson
from .entries import entry_of
from .paths import READING, ROOT, STAGING, UPLOAD, FileError, split, translate
from .removal import DIRECTORY, TRASH, check_time, move_to, removing
from .upload import Condition, Upload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_PAGE = 768 * 1024
"""Bytes of JSON of a list: it fits into one frame."""
REMOVE_SECONDS = 5.0
"""Seconds that one removal may block PID 1 at most."""


class Workspace:
    def __init__(self, root: str = ROOT) -> None:
        self.path = root
        self._real_path = os.path.realpath(root)
        self._root = os.open(root, os.O_DIRECTORY | os.O_CLOEXEC | os.O_RDONLY)
        self._uploads = 0

    def _real(self, parts: list[str]) -> list[str]:
        """The components after following links, which must stay inside the workspace."""
        try:
            real = os.path.realpath(os.path.join(self._real_path, *parts))
        except OSError as error:
            if error.errno == errno.EINVAL:
                # A link that had been replaced when it was read.
                error = OSError(errno.ELOOP, "")
            raise translate(error, "/".join(parts)) from None
        except RecursionError:
            raise FileError("bad_path", "%s has too many links" % "/".join(parts)) from None
        if real == self._real_path:
            return []
        if not real.startswith(self._real_path + "/"):
            raise FileError("bad_path", "%s leads out of the workspace" % "/".join(parts))
        return real[len(self._real_path) + 1 :].split("/")

    def _open_directory(self, parts: list[str], make: bool = False) -> int:
        """Open a directory; no component may be a link at the time it is opened."""
        here = os.dup(self._root)
        try:
            for part in self._real(parts):
                try:
                    below = os.open(part, DIRECTORY, dir_fd=here)
                except FileNotFoundError:
                    if not make:
                        raise
                    os.mkdir(part, 0o755, dir_fd=here)
                    below = os.open(part, DIRECTORY, dir_fd=here)
                os.close(here)
                here = below
        except BaseException:
            os.close(here)
            raise
        return here

    def _parent(self, path: str, make: bool = False) -> tuple[int, str]:
        """Open the directory of a path and return its last name, which may be a link."""
        parts = split(path)
        if not parts:
            raise FileError("bad_path", "this cannot be done to the workspace itself")
        return self._open_directory(parts[:-1], make), parts[-1]

    def stat(self, path: str) -> dict[str, Any]:
        parts = split(path)
        if not parts:
            return entry_of("", os.fstat(self._root))
        found: dict[str, Any] = self._in_parent(
            path, lambda fd, name: self._stat_at(fd, name, "/".join(parts))
        )
        return found

    def _stat_at(self, fd: int, name: str, path: str) -> dict[str, Any]:
        return entry_of(path, os.stat(name, dir_fd=fd, follow_symlinks=False))

    def _in_parent(self, path: str, work: Any, make: bool = False) -> Any:
        try:
            fd, name = self._parent(path, make)
            try:
                return work(fd, name)
            finally:
                os.close(fd)
        except OSError as error:
            raise translate(error, path) from None

    def open(self, path: str) -> tuple[int, os.stat_result]:
        """Open a regular file for reading. Links are followed if they stay inside."""
        try:
            parts = self._real(split(path))
            if not parts:
                raise IsADirectoryError(errno.EISDIR, "")
            directory = self._open_directory(parts[:-1])
            try:
                fd = os.open(parts[-1], READING, dir_fd=directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise translate(error, path) from None
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            kind = "is_directory" if stat.S_ISDIR(status.st_mode) else "not_a_file"
            raise FileError(kind, "%s is not a regular file" % path)
        return fd, status

    def reach(self, path: str) -> int:
        """Open a directory. Links are followed if they stay inside."""
        try:
            return self._open_directory(split(path))
        except OSError as error:
            raise translate(error, path or ROOT) from None

    @property
    def root(self) -> int:
        """The descriptor of the workspace's directory."""
        return self._root

    def reach_parent(self, path: str, make: bool = False) -> tuple[int, str]:
        """Open the directory of a path, and return the path's last name."""
        try:
            return self._parent(path, make)
        except OSError as error:
            raise translate(error, path) from None

    def list(self, path: str, after: str, limit: int) -> dict[str, Any]:
        """
        Entries in order of name, after the name `after`. Memory depends on `limit` and not on the
        directory. Returns fewer than `limit` if they would exceed the size of a page.
        """
        import heapq

        parts = split(path)
        try:
            fd = self._open_directory(parts)
            try:
                with os.scandir(fd) as names:
                    chosen = heapq.nsmallest(
                        limit + 1,
                        (
                            item.name
                            for item in names
                            if item.name > after
                            and not item.name.startswith((TRASH, UPLOAD))
                            and (parts or item.name != STAGING)
                        ),
                    )
                entries: list[dict[str, Any]] = []
                last, room = None, MAX_PAGE
                for name in chosen[:limit]:
                    try:
                        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # Removed since it was listed.
                    item = entry_of("/".join([*parts, name]), status)
                    room -= len(minijson.dumps(item))
                    if room < 0 and entries:
                        break
                    last = name
                    entries.append(item)
                else:
                    last = chosen[limit - 1] if len(chosen) > limit else None
            finally:
                os.close(fd)
        except OSError as error:
            raise translate(error, path or ROOT) from None
        return {"entries": entries, "next": last}

    def mkdir(self, path: str, parents: bool) -> dict[str, Any]:
        def make(fd: int, name: str) -> dict[str, Any]:
            try:
                os.mkdir(name, 0o755, dir_fd=fd)
            except FileExistsError:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if not (parents and stat.S_ISDIR(status.st_mode)):
                    raise
            return self._stat_at(fd, name, "/".join(split(path)))

        result: dict[str, Any] = self._in_parent(path, make, make=parents)
        return result

    def move(self, source: str, target: str, overwrite: bool) -> dict[str, Any]:
        def move(source_fd: int, source_name: str) -> dict[str, Any]:
            def onto(target_fd: int, target_name: str) -> dict[str, Any]:
                if not overwrite and _exists(target_name, target_fd):
                    raise FileError("file_exists", "%s exists already" % target)
                try:
                    os.rename(source_name, target_name, src_dir_fd=source_fd, dst_dir_fd=target_fd)
                except OSError as error:
                    if error.errno == errno.EINVAL:
                        message = "%s cannot be moved into itself" % source
                        raise FileError("bad_path", message) from None
                    raise
                return self._stat_at(target_fd, target_name, "/".join(split(target)))

            result: dict[str, Any] = self._in_parent(target, onto, make=True)
            return result

        moved: dict[str, Any] = self._in_parent(source, move)
        return moved

    def remove(self, path: str, recursive: bool) -> None:
        deadline = time.monotonic() + REMOVE_SECONDS

        def remove(fd: int, name: str) -> None:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if not stat.S_ISDIR(status.st_mode):
                os.unlink(name, dir_fd=fd)
            elif recursive:
                self._remove_tree(fd, name, path, deadline)
            else:
                os.rmdir(name, dir_fd=fd)

        try:
            self._in_parent(path, remove)
        finally:
            if recursive:
                self._empty_trash(deadline)

    def _remove_tree(self, fd: int, name: str, path: str, deadline: float) -> None:
        """
        Move each directory to the top and empty it there, so that a tree of any depth needs neither
        a deep stack nor a descriptor per level. If user code keeps refilling it, what is left has
        lost its name and is removed together with the next tree.
        """
        bin_name = "%s%d" % (TRASH, time.time_ns())
        os.mkdir(bin_name, 0o700, dir_fd=self._root)
        try:
            trash = os.open(bin_name, DIRECTORY, dir_fd=self._root)
            try:
                move_to(trash, "0", fd, name)
            finally:
                os.close(trash)
        except OSError:
            os.rmdir(bin_name, dir_fd=self._root)
            raise
        try:
            self._empty_bin(bin_name, deadline)
        except OSError as error:
            message = (
                "%s was removed, but not all its content: %s. Remove any directory to continue"
            )
            reason = error.strerror or "it took too long"
            raise FileError("not_empty", message % (path, reason)) from None

    def _empty_bin(self, name: str, deadline: float) -> None:
        for _ in removing(self._root, name):
            check_time(deadline)

    def _empty_trash(self, deadline: float) -> None:
        """Continue earlier removals, of this instance or its predecessor."""
        try:
            with os.scandir(self._root) as items:
                names = [
                    item.name
                    for item in items
                    if item.name.startswith(TRASH) and item.is_dir(follow_symlinks=False)
                ]
            for name in names:
                self._empty_bin(name, deadline)
        except OSError:
            pass  # Out of time, or user code interferes: the next removal continues.

    def chmod(self, path: str, mode: int) -> dict[str, Any]:
        def change(fd: int, name: str) -> dict[str, Any]:
            # Needs no right to the file, and cannot be redirected by a swapped link.
            here = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                if stat.S_ISLNK(os.fstat(here).st_mode):
                    raise FileError("bad_path", "%s is a link, which has no mode" % path)
                os.chmod("/proc/self/fd/%d" % here, mode & 0o777)
                return entry_of("/".join(split(path)), os.fstat(here))
            finally:
                os.close(here)

        changed: dict[str, Any] = self._in_parent(path, change)
        return changed

    def upload(self, path: str, mode: int, condition: Condition | None = None) -> Upload:
        condition = condition or Condition(None, None)
        try:
            fd, name = self._parent(path, make=True)
            try:
                if _is_directory(name, fd):
                    raise FileError("is_directory", "%s is a directory" % path)
                # Checked now as well as at the end, so that no client sends gigabytes in vain.
                condition.check(name, fd, path)
                # A new file: an existing one could be a pipe that no process reads.
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                self._uploads += 1
                temporary = "%s%d-%s" % (UPLOAD, self._uploads, os.urandom(8).hex())
                file = os.open(temporary, flags, mode & 0o777, dir_fd=fd)
                os.fchmod(file, mode & 0o777)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            raise translate(error, path) from None
        return Upload(fd, temporary, name, file, "/".join(split(path)), condition)


def _exists(name: str, fd: int) -> bool:
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _is_directory(name: str, fd: int) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
