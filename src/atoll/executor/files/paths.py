"""
Paths of the workspace: names that Atoll reserves, errors of a path, and opening below a directory.

Names that begin with `TRASH` (see `removal`) or `UPLOAD` are the executor's: files that are being
removed or received. Lists leave them out, and `STAGING` at the top: files of running executions.
"""

from __future__ import annotations

import errno
import os
import stat

from .removal import DIRECTORY

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = "/workspace"
UPLOAD = ".atoll-upload-"
STAGING = ".tmp"

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""Flags to open a file for reading; they do not block on a pipe."""
_CODES = {
    errno.ENOENT: ("file_not_found", "does not exist"),
    errno.ELOOP: ("bad_path", "leads out of the workspace, or was replaced by a link meanwhile"),
    errno.EISDIR: ("is_directory", "is a directory"),
    errno.ENOTDIR: ("not_directory", "is not a directory"),
    errno.EEXIST: ("file_exists", "already exists"),
    errno.ENOTEMPTY: ("not_empty", "is not empty"),
    errno.ENAMETOOLONG: ("bad_path", "has a name that is too long"),
    errno.EACCES: ("file_denied", "cannot be accessed: permission denied"),
    errno.EPERM: ("file_denied", "cannot be accessed: operation not permitted"),
    errno.ENOSPC: ("disk_full", "does not fit: the workspace is full"),
    errno.EDQUOT: ("disk_full", "does not fit: the workspace is full"),
    errno.EFBIG: ("disk_full", "is larger than the workspace may be"),
}


class FileError(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class FileExists(FileError):
    pass


class NotDirectory(FileError):
    pass


_KINDS = {"file_exists": FileExists, "not_directory": NotDirectory}
"""Errors that the executor itself tells apart."""


def translate(error: OSError, path: str) -> FileError:
    code, text = _CODES.get(error.errno or 0, ("file_error", os.strerror(error.errno or 0)))
    return _KINDS.get(code, FileError)(code, "%s %s" % (path, text))


def split(path: str) -> list[str]:
    """The components of a path beneath the workspace; none for the workspace itself."""
    if path == ROOT or path.startswith(ROOT + "/"):
        path = path[len(ROOT) :]
    elif path.startswith("/"):
        raise FileError("bad_path", "%s is not beneath %s" % (path, ROOT))
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise FileError("bad_path", "%s contains '..'" % path)
    if "\0" in path:
        raise FileError("bad_path", "a path cannot contain NUL")
    return parts


def is_directory(name: str, fd: int) -> bool | None:
    """Whether an entry of a directory is a directory; None if there is none of this name."""
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def open_directory(name: str, fd: int) -> int:
    return os.open(name, DIRECTORY, dir_fd=fd)


def open_below(
    top: int, parts: Iterable[str], enter: Callable[[str, int], int] = open_directory
) -> int:
    """Open a directory beneath another; no component may be a link."""
    here = os.dup(top)
    for part in parts:
        try:
            below = enter(part, here)
        finally:
            os.close(here)
        here = below
    return here
