"""
Packs a local directory as a tar archive, in chunks, while reading it.

Symbolic links and modes are kept. Hard links become separate files. Pipes, sockets and devices are
skipped and reported. A file that cannot be read, or shrinks meanwhile, is an error, so that no
partial tree is uploaded.
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
"""Skipped names."""
_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


class TarPacker:
    def __init__(self, top: Path, ignore: Ignore | None = None) -> None:
        self._top = top
        self._ignore = ignore
        self.files = 0
        self.size = 0
        """Bytes of files packed so far."""
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
                        f"{path} shrank while it was being read.", code="source_changed"
                    )
                left -= len(piece)
                self.size += len(piece)
                yield piece
        self.files += 1
        yield bytes(-status.st_size % tarfile.BLOCKSIZE)


def measure(top: Path) -> int:
    """Total bytes of the files in a directory tree."""
    return sum(status.st_size for _, _, status in walk(top) if stat.S_ISREG(status.st_mode))


def walk(top: Path, ignore: Ignore | None = None) -> Iterator[tuple[str, str, os.stat_result]]:
    """Path, name in `top`, and status of each entry. Directories precede their contents."""
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
    # The file may have become a link, which must not be followed, or a pipe, which would block.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _text(name: str) -> str:
    """The name as UTF-8, whatever the encoding of local names."""
    return os.fsencode(name).decode("utf-8", "surrogateescape")


def _head(name: str, status: os.stat_result, kind: bytes, link: str = "") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = status.st_size if kind == tarfile.REGTYPE else 0
    info.mode = stat.S_IMODE(status.st_mode) & 0o777
    info.mtime = max(0, int(status.st_mtime))
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
