"""
Packs a directory into a stream: tar, tar.gz or zip. Runs in a worker, with bounded memory.

Links stay links, modes are kept, owners are not. A hard link becomes a file of its own. Special
files are left out, and so are entries that cannot be read or were removed meanwhile. A file that
becomes shorter is padded with zeros and one that grows is cut, so the archive is always valid.
"""

from __future__ import annotations

import os
import stat
import time

from ...protocol import frames
from .paths import FileError, NotDirectory, split
from .tree_walk import Found, open_file, walk
from .workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

    from ..workers import WorkerStream

BLOCK = 256 * 1024
MAX_IN_ZIP = 50_000
"""Entries: a zip ends with a directory of all entries, which is kept in memory."""
ZIP64_FROM = 1 << 31


def pack(workspace: Workspace, request: dict[str, Any], stream: WorkerStream) -> dict[str, Any]:
    form, path = request["form"], request["path"]
    found = _items(workspace, path)
    first = next(found, None)  # Raises if the path does not exist, before anything is sent.
    if form == "zip":
        _count(workspace, path)
    out = _Out(stream)
    stream.event({"event": "packing"})
    items = _all(first, found)
    return {"skipped": _zip(items, out) if form == "zip" else _tar(items, out, form)}


def _all(first: Found | None, rest: Iterator[Found]) -> Iterator[Found]:
    if first is not None:
        yield first
        yield from rest


def _items(workspace: Workspace, path: str) -> Iterator[Found]:
    try:
        top = workspace.reach(path)
    except NotDirectory:
        return _single(workspace, path)
    return _below(top, not split(path))


def _below(top: int, at_root: bool) -> Iterator[Found]:
    try:
        yield from walk(top, at_root=at_root)
    finally:
        os.close(top)


def _single(workspace: Workspace, path: str) -> Iterator[Found]:
    directory, name = workspace.reach_parent(path)
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        yield Found((name,), directory, status, True)
    finally:
        os.close(directory)


def _count(workspace: Workspace, path: str) -> None:
    for number, _ in enumerate(_items(workspace, path)):
        if number >= MAX_IN_ZIP:
            message = "%s has more than %d entries, the maximum of a zip; use tar"
            raise FileError("too_many_entries", message % (path or "it", MAX_IN_ZIP))


class _Out:
    """Collects small writes into larger frames."""

    def __init__(self, stream: WorkerStream) -> None:
        self._stream = stream
        self._buffer = bytearray()

    def write(self, data: Any) -> int:
        self._buffer += data
        while len(self._buffer) >= frames.CHUNK:
            self._stream.send(bytes(self._buffer[: frames.CHUNK]))
            del self._buffer[: frames.CHUNK]
        return len(data)

    def flush(self) -> None:
        """Does nothing: zipfile calls it after every entry, and `finish` sends the rest."""

    def finish(self) -> None:
        self._stream.send(bytes(self._buffer))
        self._buffer.clear()


def _content(fd: int, size: int) -> Iterator[bytes]:
    """Exactly `size` bytes."""
    left = size
    while left > 0:
        data = os.read(fd, min(BLOCK, left))
        if not data:
            while left > 0:
                yield bytes(min(BLOCK, left))
                left -= BLOCK
            return
        left -= len(data)
        yield data


def _opened(item: Found) -> int | bytes | None:
    """
    The descriptor of a file, the target of a link, or -1 for a directory. None if the entry is left
    out or has been replaced.
    """
    mode, name = item.status.st_mode, item.parts[-1]
    try:
        if stat.S_ISDIR(mode):
            return -1
        if stat.S_ISLNK(mode):
            return os.readlink(os.fsencode(name), dir_fd=item.directory)
        if stat.S_ISREG(mode):
            fd, item.status = open_file(item.directory, name)
            return fd
    except OSError:
        pass
    return None


def _tar(items: Iterator[Found], out: _Out, form: str) -> int:
    import tarfile

    write: Callable[[bytes], Any] = out.write
    deflate = None
    if form == "tar.gz":
        import zlib

        deflate = zlib.compressobj(6, zlib.DEFLATED, 31)
        squeezed = deflate.compress

        def write(data: bytes) -> None:
            out.write(squeezed(data))

    def head(item: Found, kind: bytes, size: int, link: str = "") -> bytes:
        info = tarfile.TarInfo("/".join(item.parts))
        info.type, info.size, info.linkname = kind, size, link
        info.mode = stat.S_IMODE(item.status.st_mode)
        info.mtime = max(0, int(item.status.st_mtime))
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")

    skipped = 0
    for item in items:
        opened = _opened(item)
        if opened is None:
            skipped += 1
        elif isinstance(opened, bytes):
            write(head(item, tarfile.SYMTYPE, 0, os.fsdecode(opened)))
        elif opened < 0:
            write(head(item, tarfile.DIRTYPE, 0))
        else:
            try:
                size = item.status.st_size
                write(head(item, tarfile.REGTYPE, size))
                for data in _content(opened, size):
                    write(data)
                write(bytes(-size % tarfile.BLOCKSIZE))
            finally:
                os.close(opened)
    write(bytes(2 * tarfile.BLOCKSIZE))
    if deflate is not None:
        out.write(deflate.flush())
    out.finish()
    return skipped


def _zip(items: Iterator[Found], out: Any) -> int:
    import zipfile

    skipped = 0
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for item in items:
            opened = _opened(item)
            if opened is None:
                skipped += 1
            elif isinstance(opened, bytes):
                archive.writestr(_zip_head(zipfile, item, ""), opened)
            elif opened < 0:
                archive.writestr(_zip_head(zipfile, item, "/"), b"")
            else:
                try:
                    info = _zip_head(zipfile, item, "")
                    info.compress_type = zipfile.ZIP_DEFLATED
                    info.file_size = size = item.status.st_size
                    large = size >= ZIP64_FROM
                    with archive.open(info, "w", force_zip64=large) as target:
                        for data in _content(opened, size):
                            target.write(data)
                finally:
                    os.close(opened)
    out.finish()
    return skipped


def _zip_head(zipfile: Any, item: Found, suffix: str) -> Any:
    """Names in a zip are text: a byte that is not UTF-8 is percent-encoded."""
    raw = os.fsencode("/".join(item.parts))
    name = raw.decode("utf-8", "surrogateescape")
    text = "".join("%%%02X" % (ord(c) - 0xDC00) if 0xDC80 <= ord(c) <= 0xDCFF else c for c in name)
    moment = time.gmtime(min(max(item.status.st_mtime, 315_532_800), 4_354_819_198))
    info = zipfile.ZipInfo(text + suffix, moment[:6])
    info.create_system = 3
    info.external_attr = (item.status.st_mode & 0xFFFF) << 16 | (0x10 if suffix else 0)
    return info
