"""
A directory of this machine as a tar, in pieces, as it is read.

Links stay links and modes are kept; a hard link becomes a file of its own. What is neither file,
directory nor link is left out and told. What cannot be read, or becomes shorter meanwhile, is an
error: half a tree is none.
"""

from __future__ import annotations

import os
import stat
import tarfile
from typing import TYPE_CHECKING

from atoll.errors import InvalidRequest
from atoll.sdk.dockerignore import Ignore
from atoll.sdk.file_transfer import CHUNK

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_REPORTED = 1000
"""Names of what was left out."""
_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


class TarPacker:
    def __init__(self, top: Path, ignore: Ignore | None = None) -> None:
        self._top = top
        self._ignore = ignore
        self.files = 0
        self.size = 0
        """Bytes of files, so far."""
        self.left_out: list[str] = []

    def __iter__(self) -> Iterator[bytes]:
        gathered = bytearray()
        for piece in self._pieces():
            gathered += piece
            if len(gathered) >= CHUNK:
                yield bytes(gathered)
                gathered.clear()
        yield bytes(gathered + bytes(2 * tarfile.BLOCKSIZE))

    def _pieces(self) -> Iterator[bytes]:
        for path, name, status in walk(self._top, self._ignore):
            mode = status.st_mode
            if stat.S_ISDIR(mode):
                yield _head(name, status, tarfile.DIRTYPE)
            elif stat.S_ISLNK(mode):
                yield _head(name, status, tarfile.SYMTYPE, _text(os.readlink(path)))
            elif stat.S_ISREG(mode):
                yield from self._file(path, name)
            elif len(self.left_out) < MAX_REPORTED:
                kind = next((text for is_one, text in _KINDS if is_one(mode)), "a device")
                self.left_out.append(f"{name}: {kind}")

    def _file(self, path: str, name: str) -> Iterator[bytes]:
        with open(path, "rb", buffering=0, opener=_opener) as file:
            status = os.fstat(file.fileno())
            left = status.st_size
            yield _head(name, status, tarfile.REGTYPE)
            while left:
                piece = file.read(min(CHUNK, left))
                if not piece:
                    raise InvalidRequest(
                        f"{path} became shorter while it was read.", code="source_changed"
                    )
                left -= len(piece)
                self.size += len(piece)
                yield piece
        self.files += 1
        yield bytes(-status.st_size % tarfile.BLOCKSIZE)


def measure(top: Path) -> int:
    """Bytes of the files beneath a directory."""
    return sum(status.st_size for _, _, status in walk(top) if stat.S_ISREG(status.st_mode))


def walk(top: Path, ignore: Ignore | None = None) -> Iterator[tuple[str, str, os.stat_result]]:
    """Path, name beneath the top, and what it is; a directory before what is in it."""
    ignored = ignore or Ignore()

    def refuse(error: OSError) -> None:
        raise error

    root = os.fspath(top)
    for directory, children, names in os.walk(root, onerror=refuse):
        inside = os.path.relpath(directory, root)
        shown = {name: name if inside == "." else f"{inside}/{name}" for name in children + names}
        for name, path in shown.items():
            if path not in ignored:
                full = os.path.join(directory, name)
                yield full, _text(path), os.lstat(full)
        if not ignored.has_exceptions:
            children[:] = [name for name in children if shown[name] not in ignored]


def _opener(path: str, flags: int) -> int:
    # What became a link or a pipe since it was looked at is not followed, and not waited for.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _text(name: str) -> str:
    """As the wire has it: UTF-8, whatever this machine's names are in."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def _head(name: str, status: os.stat_result, kind: bytes, link: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = status.st_size if kind == tarfile.REGTYPE else 0
    info.mode = stat.S_IMODE(status.st_mode) & 0o777
    info.mtime = max(0, int(status.st_mtime))
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
