"""
Unpacks an archive into a directory: tar, tar.gz or zip. Runs in a worker.

Nothing appears in the directory until the archive was read completely and is valid; then
directories are merged and files replace files. An archive is rejected if it has an absolute name, a
name with `..`, a device, a pipe, or a hard link to a file outside the archive. Symbolic links are
kept, and nothing is ever written through one. The unpacked bytes count against the workspace's
size, whatever the archive announces. Owners and set-user-id bits are dropped.

A zip is read from its end, so it is stored in the workspace without a name while it is unpacked.
"""

from __future__ import annotations

import errno
import os
import stat

from ..workers import StreamClosed, WorkerStream
from .paths import UPLOAD, FileError
from .staged_tree import StagedTree
from .workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable

BLOCK = 256 * 1024
MAX_LINK = 4095
MAX_PADDING = 16 * 1024 * 1024
"""Bytes after the end of a tar in gzip; tar pads to its record size, usually 10 KiB."""


def unpack(
    workspace: Workspace, request: dict[str, Any], stream: WorkerStream, room: int | None
) -> dict[str, Any]:
    with StagedTree(workspace, room) as tree:
        try:
            count = _unzip(stream, tree) if request["form"] == "zip" else _untar(stream, tree)
        except (StreamClosed, FileError, MemoryError, ImportError):
            raise
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise _bad("a name leads through a link or a file") from None
            if error.errno is not None:
                raise
            raise _bad("it cannot be read: %s" % error) from None
        except Exception as error:  # noqa: BLE001 - these modules raise anything for broken data
            raise _bad("it cannot be read: %s" % error) from None
        while stream.read(BLOCK):
            pass  # Padding after the end.
        tree.merge(request["path"])
    return {"entries": count}


def _bad(why: str) -> FileError:
    return FileError("bad_archive", "the archive was not unpacked: %s" % why)


def _parts(name: str) -> tuple[str, ...]:
    if name.startswith("/") or "\0" in name:
        raise _bad("%s is not a relative name" % name[:200])
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise _bad("%s contains '..'" % name[:200])
    if any(part.startswith(UPLOAD) for part in parts):
        raise _bad("names that begin with %s are reserved for Atoll" % UPLOAD)
    return parts


def _write(
    tree: StagedTree, parts: tuple[str, ...], pieces: Iterable[bytes], mode: int, at: int
) -> None:
    fd = tree.file(parts)
    try:
        for piece in pieces:
            tree.count(len(piece))
            view = memoryview(piece)
            while view:
                view = view[os.write(fd, view) :]
        os.fchmod(fd, mode & 0o777)
        os.utime(fd, (at, at))
    finally:
        os.close(fd)


def _pieces(file: Any) -> Iterable[bytes]:
    return iter(lambda: file.read(BLOCK), b"")


class _Peeked:
    """A stream whose first bytes have been read already."""

    def __init__(self, stream: WorkerStream) -> None:
        self._stream = stream
        self.head = stream.read()
        while 0 < len(self.head) < 2:
            more = stream.read()
            if not more:
                break
            self.head += more
        self._left = self.head

    def read(self, size: int = -1) -> bytes:
        if self._left:
            data, self._left = self._left[:size], self._left[size:]
            return data
        return self._stream.read(size)


class _Inflated:
    """
    The content of a gzip stream, verified to its end: tarfile does not verify checksums, and does
    not notice that a stream is cut off.
    """

    def __init__(self, source: _Peeked) -> None:
        import zlib

        self._source = source
        self._zlib: Any = zlib
        self._member = zlib.decompressobj(31)
        self._waiting = b""

    def read(self, size: int) -> bytes:
        while True:
            if self._member.eof and not self._next_member():
                return b""
            data = self._member.decompress(self._waiting, size)
            self._waiting = self._member.unconsumed_tail
            if data:
                return data
            if not self._member.eof and not self._waiting:
                self._waiting = self._source.read(BLOCK)
                if not self._waiting:
                    raise ValueError("the gzip stream is cut off")

    def _next_member(self) -> bool:
        """Streams may be concatenated, with zeros after each."""
        rest = self._member.unused_data.lstrip(b"\0")
        while not rest:
            piece = self._source.read(BLOCK)
            if not piece:
                return False
            rest = piece.lstrip(b"\0")
        self._member, self._waiting = self._zlib.decompressobj(31), rest
        return True

    def finish(self) -> None:
        """Read the padding after the archive, and verify the checksum."""
        left = MAX_PADDING
        while left >= 0:
            data = self.read(BLOCK)
            if not data:
                return
            left -= len(data)
        raise ValueError("more than %d bytes follow its end" % MAX_PADDING)


def _untar(stream: WorkerStream, tree: StagedTree) -> int:
    source = _Peeked(stream)
    if source.head[:2] != b"\x1f\x8b":
        return _unpack_tar(source, tree)
    inflated = _Inflated(source)
    count = _unpack_tar(inflated, tree)
    inflated.finish()
    return count


def _unpack_tar(source: Any, tree: StagedTree) -> int:
    import tarfile

    class Strict(tarfile.TarInfo):
        """Rejects a broken header, which tarfile takes for the end of the archive."""

        @classmethod
        def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
            try:
                return super().frombuf(buf, encoding, errors)
            except (tarfile.EmptyHeaderError, tarfile.EOFHeaderError):  # type: ignore[attr-defined]
                raise
            except tarfile.HeaderError as error:
                raise ValueError(str(error)) from None

    count = 0
    with tarfile.open(
        fileobj=source, mode="r|", encoding="utf-8", errors="surrogateescape", bufsize=BLOCK,
        tarinfo=Strict,
    ) as archive:  # fmt: skip
        for member in archive:
            # Otherwise tarfile would keep all members in memory.
            archive.members = []  # type: ignore[attr-defined]
            parts = _parts(member.name)
            count += 1
            at = max(0, min(int(member.mtime), 1 << 33))
            if member.isdir():
                tree.directory(parts, member.mode & 0o777)
            elif not parts:
                raise _bad("an entry has no name")
            elif member.issparse():
                raise _bad("%s is sparse; pack it without --sparse" % member.name)
            elif member.isreg():
                file = archive.extractfile(member)
                assert file is not None
                _write(tree, parts, _pieces(file), member.mode, at)
            elif member.issym():
                if not 0 < len(member.linkname) <= MAX_LINK:
                    raise _bad("%s is not a valid link" % member.name)
                tree.symlink(parts, member.linkname)
            elif member.islnk():
                target = _parts(member.linkname)
                if not target:
                    raise _bad("%s is a hard link without a target" % member.name)
                try:
                    tree.link(parts, target)
                except OSError:
                    message = "%s is a hard link to a file outside the archive"
                    raise _bad(message % member.name) from None
            else:
                raise _bad("%s is a device or a pipe" % member.name)
    return count


def _unzip(stream: WorkerStream, tree: StagedTree) -> int:
    import zipfile

    name = "spool"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=tree.top)
    with open(fd, "w+b") as spool:
        os.unlink(name, dir_fd=tree.top)
        for piece in _pieces(stream):
            tree.count(len(piece))
            spool.write(piece)
        spool.flush()
        count = 0
        with zipfile.ZipFile(spool) as archive:
            for info in archive.infolist():
                parts = _parts(info.filename)
                count += 1
                mode = info.external_attr >> 16
                if info.flag_bits & 1:
                    raise _bad("%s is encrypted" % info.filename)
                if info.is_dir():
                    tree.directory(parts, (mode & 0o777) or 0o755)
                elif not parts:
                    raise _bad("an entry has no name")
                elif stat.S_ISLNK(mode):
                    with archive.open(info) as file:
                        target = os.fsdecode(file.read(MAX_LINK + 1))
                    if not 0 < len(target) <= MAX_LINK or "\0" in target:
                        raise _bad("%s is not a valid link" % info.filename)
                    tree.symlink(parts, target)
                else:
                    with archive.open(info) as file:
                        at = _moment(info.date_time)
                        _write(tree, parts, _pieces(file), (mode & 0o777) or 0o644, at)
    return count


def _moment(date_time: tuple[int, ...]) -> int:
    import calendar

    try:
        return max(0, calendar.timegm((*date_time, 0, 0, 0)))
    except (ValueError, OverflowError):
        return 0
