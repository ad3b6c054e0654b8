"""
A tree on its way into the workspace: made aside, and put in its place when it is whole.

Runs in a worker. The tree grows in a directory of its own at the top of the workspace whose name is
the executor's. No part of a path is followed if it is a link, so what user code does to the tree
meanwhile harms the tree alone. What fails or is broken off is removed; what is killed in the middle
is removed when the executor starts again.
"""

from __future__ import annotations

import errno
import os
import stat

from .paths import UPLOAD, FileError, open_below, split, translate
from .removal import DIRECTORY, removing
from .tree_walk import MAX_DEPTH
from .workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_ENTRIES = 1_000_000
RESERVE = 4 * 1024 * 1024
"""Bytes that are given back when a tree is removed because there is no more memory."""
SMALLEST = 4096
"""What each entry takes at least, where nobody else counts what fits."""


class Tree:
    def __init__(self, workspace: Workspace, room: int | None) -> None:
        self._workspace = workspace
        self._room = room
        found = os.fstatvfs(workspace.root)
        self._free = found.f_bavail * found.f_frsize
        self._name = UPLOAD + os.urandom(8).hex()
        self._entries = 0
        self._here: tuple[tuple[str, ...], int] | None = None
        os.mkdir(self._name, 0o755, dir_fd=workspace.root)
        self._top = os.open(self._name, DIRECTORY, dir_fd=workspace.root)
        self._placed = False
        self._reserve = bytearray(RESERVE)

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *error: object) -> None:
        self._reserve.clear()
        self._leave()
        os.close(self._top)
        if not self._placed:
            try:
                for _ in removing(self._workspace.root, self._name):
                    pass
            except OSError:
                pass  # User code is at it; the executor's next start removes the rest.

    @property
    def top(self) -> int:
        return self._top

    def count(self, size: int) -> None:
        """
        So many bytes more; an error when they do not fit. What a later entry of the same name frees
        is not given back, so that a small archive cannot have the same space written for hours.
        """
        self._free -= size
        if self._free < 0:
            raise translate(OSError(errno.ENOSPC, ""), "it")
        self._take_room(size)

    def _take_room(self, size: int) -> None:
        if self._room is not None:
            self._room -= size
            if self._room < 0:
                raise translate(OSError(errno.ENOSPC, ""), "it")

    def entry(self) -> None:
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise FileError("too_many_entries", "more than %d entries" % MAX_ENTRIES)
        self._take_room(SMALLEST)

    def _leave(self) -> None:
        if self._here is not None:
            os.close(self._here[1])
            self._here = None

    def directory(self, parts: tuple[str, ...], mode: int = 0o755) -> int:
        """A directory in the tree, made where it is missing; open until the next is asked for."""
        if self._here is not None and self._here[0] == parts:
            return self._here[1]
        if len(parts) > MAX_DEPTH:
            raise FileError("bad_archive", "%s/… is nested too deep" % "/".join(parts)[:200])
        self._leave()
        here = os.dup(self._top)
        try:
            for part in parts:
                try:
                    os.mkdir(part, mode | 0o700, dir_fd=here)
                    self.entry()
                except FileExistsError:
                    pass
                below = os.open(part, DIRECTORY, dir_fd=here)
                os.close(here)
                here = below
        except BaseException:
            os.close(here)
            raise
        self._here = (parts, here)
        return here

    def file(self, parts: tuple[str, ...]) -> int:
        """A new file, open for writing; what had its name before is gone."""
        self.entry()
        directory = self.directory(parts[:-1])
        _clear(parts[-1], directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(parts[-1], flags, 0o600, dir_fd=directory)

    def symlink(self, parts: tuple[str, ...], target: str) -> None:
        """Whatever it points to: nothing of ours follows it out."""
        self.entry()
        directory = self.directory(parts[:-1])
        _clear(parts[-1], directory)
        os.symlink(target, parts[-1], dir_fd=directory)

    def link(self, parts: tuple[str, ...], target: tuple[str, ...]) -> None:
        """Another name of a file of this tree."""
        self.entry()
        source = os.dup(self.directory(target[:-1]))
        try:
            if not stat.S_ISREG(os.stat(target[-1], dir_fd=source, follow_symlinks=False).st_mode):
                raise FileError("bad_archive", "a link leads to what is no file of the archive")
            directory = self.directory(parts[:-1])
            if parts != target:
                _clear(parts[-1], directory)
                os.link(
                    target[-1], parts[-1], src_dir_fd=source, dst_dir_fd=directory,
                    follow_symlinks=False,
                )  # fmt: skip
        finally:
            os.close(source)

    # Into its place

    def place(self, path: str, overwrite: bool, only: str | None = None) -> dict[str, Any]:
        """The whole tree, or what is called `only` at its top, gets the name `path`."""
        self._leave()
        directory, name = self._workspace.reach_parent(path, make=True)
        try:
            try:
                os.stat(name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                pass
            else:
                if not overwrite:
                    raise FileError("file_exists", "%s exists already" % path)
            try:
                if only is None:
                    os.rename(
                        self._name, name, src_dir_fd=self._workspace.root, dst_dir_fd=directory
                    )
                    self._placed = True
                else:
                    os.rename(only, name, src_dir_fd=self._top, dst_dir_fd=directory)
            except OSError as error:
                raise translate(error, path) from None
        finally:
            os.close(directory)
        return self._workspace.stat(path)

    def merge(self, path: str) -> None:
        """
        What is in the tree goes into the directory `path`, file by file: directories are merged, a
        file takes the place of a file. What cannot is found before anything is moved.
        """
        self._leave()
        if split(path):
            try:
                self._workspace.mkdir(path, True)
            except FileError as error:
                if error.code != "file_exists":
                    raise  # What is there may be a link to a directory, which is one too.
        target = self._workspace.reach(path)
        try:
            self._go_through(target, path, move=False)
            self._go_through(target, path, move=True)
        except OSError as error:
            raise translate(error, path) from None
        finally:
            os.close(target)

    def _go_through(self, target: int, path: str, *, move: bool) -> None:
        waiting: list[tuple[str, ...]] = [()]
        while waiting:
            parts = waiting.pop()
            here, there = open_below(self._top, parts), open_below(target, parts)
            try:
                with os.scandir(here) as items:
                    names = [(item.name, item.is_dir(follow_symlinks=False)) for item in items]
                for name, is_directory in names:
                    held = _kind(name, there)
                    if held and is_directory:
                        waiting.append((*parts, name))
                    elif held is not None and held != is_directory:
                        words = "%s is a directory on one side and none on the other"
                        raise FileError("file_exists", words % "/".join((*parts, name)))
                    elif move:
                        os.rename(name, name, src_dir_fd=here, dst_dir_fd=there)
            finally:
                os.close(here)
                os.close(there)


def _kind(name: str, fd: int) -> bool | None:
    """Whether it is a directory; None when it is not there."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _clear(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):
        raise FileError("bad_archive", "%s is there twice, once as a directory" % name) from None
