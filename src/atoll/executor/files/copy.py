"""
Copies a file or a tree inside the workspace, completely or not at all. Runs in a worker.

Modes, times, links and holes are kept. Special files are left out. A tree that changes meanwhile is
copied as it is found.
"""

from __future__ import annotations

import errno
import os
import stat

from .paths import FileError, split, translate
from .removal import DIRECTORY
from .staged_tree import StagedTree
from .tree_walk import MAX_DEPTH, Found, open_file, walk
from .workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BLOCK = 4 * 1024 * 1024
_FILE = "copy"


def copy(workspace: Workspace, request: dict[str, Any], room: int | None) -> dict[str, Any]:
    source, target = request["source"], request["target"]
    overwrite = bool(request["overwrite"])
    if not split(source):
        raise FileError("bad_path", "the workspace itself cannot be copied")
    directory, name = workspace.reach_parent(source)
    skipped = 0
    try:
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            raise translate(error, source) from None
        with StagedTree(workspace, room) as tree:
            if stat.S_ISDIR(status.st_mode):
                top = os.open(name, DIRECTORY, dir_fd=directory)
                try:
                    for item in walk(top, at_root=False):
                        skipped += not _copy_entry(tree, item, item.parts)
                        if len(item.parts) >= MAX_DEPTH and stat.S_ISDIR(item.status.st_mode):
                            message = "%s/… has too many levels to be copied"
                            raise FileError("bad_path", message % "/".join(item.parts)[:200])
                finally:
                    os.close(top)
                os.fchmod(tree.top, stat.S_IMODE(status.st_mode) & 0o777 | 0o700)
                entry = tree.place(target, overwrite)
            else:
                if not _copy_entry(tree, Found((name,), directory, status, True), (_FILE,)):
                    raise FileError("not_a_file", "%s is a pipe, socket or device" % source)
                entry = tree.place(target, overwrite, only=_FILE)
    finally:
        os.close(directory)
    return {"entry": entry, "skipped": skipped}


def _copy_entry(tree: StagedTree, item: Found, parts: tuple[str, ...]) -> bool:
    """Copy one entry; returns False for a special file and for one that was removed."""
    mode, name = item.status.st_mode, item.parts[-1]
    if stat.S_ISDIR(mode):
        tree.directory(parts, stat.S_IMODE(mode) & 0o777)
        return True
    if stat.S_ISLNK(mode):
        try:
            link = os.readlink(name, dir_fd=item.directory)
        except OSError:
            return False
        tree.symlink(parts, link)
        return True
    if not stat.S_ISREG(mode):
        return False
    try:
        source, status = open_file(item.directory, name)
    except FileNotFoundError:
        return False
    try:
        target = tree.file(parts)
        try:
            _copy_content(tree, source, target, status.st_size)
            os.fchmod(target, stat.S_IMODE(status.st_mode) & 0o777)
            os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))
        finally:
            os.close(target)
    finally:
        os.close(source)
    return True


def _copy_content(tree: StagedTree, source: int, target: int, size: int) -> None:
    """Copy the data; holes stay holes."""
    at = 0
    while at < size:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            break  # Only a hole is left.
        end = min(os.lseek(source, start, os.SEEK_HOLE), size)
        os.lseek(source, start, os.SEEK_SET)
        os.lseek(target, start, os.SEEK_SET)
        left = end - start
        while left > 0:
            data = os.read(source, min(BLOCK, left))
            if not data:
                break  # The file has become shorter.
            tree.count(len(data))
            left -= len(data)
            view = memoryview(data)
            while view:
                view = view[os.write(target, view) :]
        at = end
    os.ftruncate(target, size)
