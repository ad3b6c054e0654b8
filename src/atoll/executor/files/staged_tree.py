"""
A directory tree that is built aside and moved into its place when it is complete.

Runs in a worker. The tree is built in a directory with a reserved name at the top of the workspace.
No component of a path may be a link, so changes by user code harm only the tree itself. A tree that
fails is removed; after a kill it is removed when the executor starts again.
"""

from __future__ import annotations

import errno
import os
import stat

from .paths import UPLOAD, FileError, FileExists, is_directory, open_below, split, translate
from .removal import DIRECTORY, removing
from .tree_walk import MAX_DEPTH
from .workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_ENTRIES = 1_000_000
RESERVE = 4 * 1024 * 1024
"""Bytes that are freed when a tree is removed because memory has run out."""
MIN_ENTRY = 4096
"""Bytes that each entry counts at least, where the executor limits the disk."""


class StagedTree:
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

    def __enter__(self) -> StagedTree:
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
                pass  # User code interferes; the executor's next start removes the rest.

    @property
    def top(self) -> int:
        return self._top

    def count(self, size: int) -> None:
        """
        Count bytes; raises an error if they do not fit. Replacing an entry frees nothing, so that a
        small archive cannot write the same space for hours.
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

    def count_entry(self) -> None:
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise FileError("too_many_entries", "more than %d entries" % MAX_ENTRIES)
        self._take_room(MIN_ENTRY)

    def _leave(self) -> None:
        if self._here is not None:
            os.close(self._here[1])
            self._here = None

    def directory(self, parts: tuple[str, ...], mode: int = 0o755) -> int:
        """A directory of the tree, made if it is missing. Valid until the next call."""
        if self._here is not None and self._here[0] == parts:
            return self._here[1]
        if len(parts) > MAX_DEPTH:
            raise FileError("bad_archive", "%s/… has too many levels" % "/".join(parts)[:200])
        self._leave()
        here = os.dup(self._top)
        try:
            for part in parts:
                try:
                    os.mkdir(part, mode | 0o700, dir_fd=here)
                    self.count_entry()
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
        """A new file, open for writing; it replaces an entry of the same name."""
        self.count_entry()
        directory = self.directory(parts[:-1])
        _clear(parts[-1], directory)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(parts[-1], flags, 0o600, dir_fd=directory)

    def symlink(self, parts: tuple[str, ...], target: str) -> None:
        """A link to anything: no other method follows it."""
        self.count_entry()
        directory = self.directory(parts[:-1])
        _clear(parts[-1], directory)
        os.symlink(target, parts[-1], dir_fd=directory)

    def link(self, parts: tuple[str, ...], target: tuple[str, ...]) -> None:
        """A hard link to a file of this tree."""
        self.count_entry()
        source = os.dup(self.directory(target[:-1]))
        try:
            if not stat.S_ISREG(os.stat(target[-1], dir_fd=source, follow_symlinks=False).st_mode):
                raise FileError("bad_archive", "a link leads to no file of the archive")
            directory = self.directory(parts[:-1])
            if parts != target:
                _clear(parts[-1], directory)
                os.link(
                    target[-1], parts[-1], src_dir_fd=source, dst_dir_fd=directory,
                    follow_symlinks=False,
                )  # fmt: skip
        finally:
            os.close(source)

    # Move into place

    def place(self, path: str, overwrite: bool, only: str | None = None) -> dict[str, Any]:
        """Move the tree, or the entry `only` at its top, to `path`."""
        self._leave()
        directory, name = self._workspace.reach_parent(path, make=True)
        try:
            try:
                os.stat(name, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                pass
            else:
                if not overwrite:
                    raise FileError("file_exists", "%s already exists" % path)
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
        Move the entries of the tree into the directory `path`: directories are merged and files
        replace files. Conflicts are found before anything is moved.
        """
        self._leave()
        if split(path):
            try:
                self._workspace.mkdir(path, True)
            except FileExists:
                pass  # It may be a link to a directory, which is fine.
        target = self._workspace.reach(path)
        try:
            self._merge_all(target, move=False)
            self._merge_all(target, move=True)
        except OSError as error:
            raise translate(error, path) from None
        finally:
            os.close(target)

    def _merge_all(self, target: int, *, move: bool) -> None:
        waiting: list[tuple[str, ...]] = [()]
        while waiting:
            parts = waiting.pop()
            here, there = open_below(self._top, parts), open_below(target, parts)
            try:
                with os.scandir(here) as items:
                    names = [(item.name, item.is_dir(follow_symlinks=False)) for item in items]
                for name, is_tree in names:
                    held = is_directory(name, there)
                    if held and is_tree:
                        waiting.append((*parts, name))
                    elif held is not None and held != is_tree:
                        message = "%s is a directory on one side and a file on the other"
                        raise FileError("file_exists", message % "/".join((*parts, name)))
                    elif move:
                        os.rename(name, name, src_dir_fd=here, dst_dir_fd=there)
            finally:
                os.close(here)
                os.close(there)


def _clear(name: str, directory: int) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass
    except (IsADirectoryError, PermissionError):
        raise FileError("bad_archive", "%s occurs twice, once as a directory" % name) from None
