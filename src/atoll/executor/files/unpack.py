"""
An archive that is sent to us, into a directory: tar, as it is or in gzip, or zip.

Runs in a worker. Nothing of it is in place before all of it was read and is sound; then directories
are merged and files take the place of files. A name that is absolute or has `..`, a device, a pipe
or a hard link to what is not in the archive refuses the whole. Symbolic links are kept as they are,
and nothing is ever written through one. What is unpacked counts against the workspace's size as it
comes, whatever the archive announces. Owners and set-user-id bits are dropped.

A zip is read from its end: it lies in the workspace, without a name, until it is unpacked.
"""

from __future__ import annotations

import errno
import os
import stat

from ..workers import StreamClosed, WorkerStream
from .paths import UPLOAD, FileError
from .staged_tree import Tree
from .workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable

BLOCK = 256 * 1024
MAX_LINK = 4095
MAX_PADDING = 16 * 1024 * 1024
"""Bytes behind the end of an archive in gzip; tar fills up to its record size, 10 KiB mostly."""


def unpack(
    workspace: Workspace, request: dict[str, Any], stream: WorkerStream, room: int | None
) -> dict[str, Any]:
    with Tree(workspace, room) as tree:
        try:
            if request["form"] == "zip":
                count = _unzip(workspace, stream, tree)
            else:
                count = _untar(stream, tree)
        except (StreamClosed, FileError, MemoryError, ImportError):
            raise
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise _bad("a name in it goes through a link or a file") from None
            if error.errno is not None:
                raise
            raise _bad("it cannot be read (%s)" % error) from None
        except Exception as error:  # noqa: BLE001 - these modules raise anything for broken data
            raise _bad("it cannot be read (%s)" % error) from None
        while stream.read(BLOCK):
            pass  # Padding behind the end.
        tree.merge(request["path"])
    return {"entries": count}


def _bad(why: str) -> FileError:
    return FileError("bad_archive", "the archive was not unpacked: %s" % why)


def _parts(name: str) -> tuple[str, ...]:
    if name.startswith("/") or "\0" in name:
        raise _bad("%s is not a relative name" % name[:200])
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise _bad("%s has '..' in it" % name[:200])
    if any(part.startswith(UPLOAD) for part in parts):
        raise _bad("names that begin with %s are Atoll's own" % UPLOAD)
    return parts


def _write(tree: Tree, parts: tuple[str, ...], pieces: Iterable[bytes], mode: int, at: int) -> None:
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
    """A line whose beginning was looked at."""

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
    The content of a gzip stream, checked to its end: what tarfile inflates it does not check, and
    it takes a stream that is cut off for one that ends.
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
        """There may be several in a row, and zeros behind each."""
        rest = self._member.unused_data.lstrip(b"\0")
        while not rest:
            piece = self._source.read(BLOCK)
            if not piece:
                return False
            rest = piece.lstrip(b"\0")
        self._member, self._waiting = self._zlib.decompressobj(31), rest
        return True

    def finish(self) -> None:
        """What is behind the archive, which is padding, to the checksum."""
        left = MAX_PADDING
        while left >= 0:
            data = self.read(BLOCK)
            if not data:
                return
            left -= len(data)
        raise ValueError("more than %d bytes follow its end" % MAX_PADDING)


def _untar(stream: WorkerStream, tree: Tree) -> int:
    source = _Peeked(stream)
    if source.head[:2] != b"\x1f\x8b":
        return _unpack_tar(source, tree)
    inflated = _Inflated(source)
    count = _unpack_tar(inflated, tree)
    inflated.finish()
    return count


def _unpack_tar(source: Any, tree: Tree) -> int:
    import tarfile

    class Strict(tarfile.TarInfo):
        """Tarfile takes a broken header behind a good one for the end, and half for all of it."""

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
            # It would remember all of them.
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
                    raise _bad("%s is no link that can be made" % member.name)
                tree.symlink(parts, member.linkname)
            elif member.islnk():
                target = _parts(member.linkname)
                if not target:
                    raise _bad("%s is a link to nothing" % member.name)
                try:
                    tree.link(parts, target)
                except OSError:
                    words = "%s is a hard link to what is not in the archive"
                    raise _bad(words % member.name) from None
            else:
                raise _bad("%s is a device or a pipe" % member.name)
    return count


def _unzip(workspace: Workspace, stream: WorkerStream, tree: Tree) -> int:
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
                        raise _bad("%s is no link that can be made" % info.filename)
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
