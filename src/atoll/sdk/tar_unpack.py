"""
Unpacks a tar stream from a server into a local directory.

Nothing is written outside of that directory, whatever the archive contains. Absolute names and `..`
are errors, directories are opened without following links, and files are placed by a rename.
Symbolic links that could point outside are skipped and reported. Each file is replaced atomically,
but not the tree as one. Memory depends only on the depth, which is bounded.
"""

from __future__ import annotations

import errno
import os
import secrets
import tarfile
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from atoll.errors import InvalidRequest, PermanentError
from atoll.sdk.tar_pack import MAX_REPORTED

if TYPE_CHECKING:
    from pathlib import Path

MAX_DEPTH = 200
MAX_EXTENSION = 1024 * 1024
"""Bytes of the extended header of one entry."""
MAX_DIGITS = 9
"""Digits of the length of a record in an extended header."""
_LEFT_OUT = (tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)
_LONG = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}


class _OpenDirectory(NamedTuple):
    """A directory on the path to the current entry."""

    name: str
    fd: int
    mode: int | None
    """Mode to set when it is complete. None if the directory existed before."""


class _File(NamedTuple):
    fd: int
    part: str
    name: str
    mtime: float


class TarUnpacker:
    """Call `feed` with the chunks, `finish` after the last one, and `close` in any case."""

    def __init__(self, top: Path) -> None:
        top.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._stack = [_OpenDirectory("", os.open(top, flags), None)]
        self._buffer = bytearray()
        self._more: dict[str, str] = {}
        self._extension: tarfile.TarInfo | None = None
        self._file: _File | None = None
        self._left = 0
        self._skip = 0
        self._ended = False
        self.files = 0
        self.size = 0
        self.left_out: list[str] = []

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while self._step():
            pass

    def finish(self) -> None:
        if not self._ended:
            raise _bad("it is incomplete")
        while len(self._stack) > 1:
            self._leave()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file.fd)
            with suppress(OSError):
                os.unlink(self._file.part, dir_fd=self._stack[-1].fd)
            self._file = None
        while self._stack:
            os.close(self._stack.pop().fd)

    def _step(self) -> bool:
        """Process one step. False if it needs more data."""
        buffer = self._buffer
        if self._ended:
            buffer.clear()
            return False
        if self._file is not None:
            return self._write(self._file)
        if self._skip:
            taken = min(self._skip, len(buffer))
            del buffer[:taken]
            self._skip -= taken
            return taken > 0
        block = tarfile.BLOCKSIZE
        if self._extension is not None:
            size = self._extension.size
            whole = size + -size % block
            if len(buffer) < whole:
                return False
            self._extend(self._extension.type, bytes(buffer[:size]))
            self._extension = None
            del buffer[:whole]
            return True
        if len(buffer) < block:
            return False
        head = bytes(buffer[:block])
        del buffer[:block]
        if not any(head):
            self._ended = True
            return True
        try:
            info = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        except (tarfile.TarError, ValueError) as error:
            raise _bad(str(error)) from None
        self._enter(info)
        return True

    def _extend(self, kind: bytes, data: bytes) -> None:
        """Read an extended header: values that do not fit into a plain one."""
        if kind in _LONG:
            self._more[_LONG[kind]] = _text(data.partition(b"\0")[0])
        elif kind == tarfile.XHDTYPE:
            at = 0
            while at < len(data):
                length, _, _ = data[at : at + MAX_DIGITS + 1].partition(b" ")
                end = at + int(length) if length.isdigit() else at
                if len(length) > MAX_DIGITS or not at + 3 < end <= len(data):
                    raise _bad("a record of its header has no valid length")
                name, _, value = data[at + len(length) + 1 : end - 1].partition(b"=")
                at = end
                if name.startswith(b"GNU.sparse"):
                    raise _bad("it has sparse entries")
                self._more[_text(name)] = _text(value)

    def _enter(self, info: tarfile.TarInfo) -> None:
        if info.size < 0:
            raise _bad("a size is negative")
        if info.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, *_LONG):
            if info.size > MAX_EXTENSION:
                raise _bad("a header is too long")
            self._extension = info
            return
        more, self._more = self._more, {}
        size = more.get("size", str(info.size))
        if not size.isascii() or not size.isdigit() or len(size) > 18:
            raise _bad("a size is not a number")
        info.size = int(size)
        name, link = more.get("path", info.name), more.get("linkpath", info.linkname)
        parts = _parts(name)
        if info.isdir():
            self._go(parts, info.mode)
        elif not parts:
            raise _bad("an entry has no name")
        elif info.type in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE):
            self._begin(parts, info)
        elif info.issym():
            self._link(parts, link)
        elif info.type in _LEFT_OUT:
            self._leave_out(name, "not a file, directory or link")
        else:
            raise _bad(f"{name} has an unknown type")

    def _begin(self, parts: tuple[str, ...], info: tarfile.TarInfo) -> None:
        self._go(parts[:-1])
        part = f".{secrets.token_hex(8)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(part, flags, info.mode & 0o777, dir_fd=self._stack[-1].fd)
        self._file = _File(fd, part, parts[-1], max(0.0, min(float(info.mtime), 2.0**33)))
        self._left = info.size
        self._skip = -info.size % tarfile.BLOCKSIZE

    def _write(self, file: _File) -> bool:
        if self._left:
            with memoryview(self._buffer) as view:
                taken = os.write(file.fd, view[: self._left]) if view else 0
            del self._buffer[:taken]
            self._left -= taken
            self.size += taken
            return taken > 0
        os.utime(file.fd, (file.mtime, file.mtime))
        self._place(file.part, file.name)
        os.close(file.fd)
        self._file = None
        self.files += 1
        return True

    def _link(self, parts: tuple[str, ...], target: str) -> None:
        if not _is_inside(target, len(parts) - 1):
            self._leave_out("/".join(parts), "a link that points outside")
            return
        self._go(parts[:-1])
        part = f".{secrets.token_hex(8)}.part"
        os.symlink(target, part, dir_fd=self._stack[-1].fd)
        try:
            self._place(part, parts[-1])
        except BaseException:
            os.unlink(part, dir_fd=self._stack[-1].fd)
            raise

    def _place(self, part: str, name: str) -> None:
        here = self._stack[-1].fd
        try:
            os.replace(part, name, src_dir_fd=here, dst_dir_fd=here)
        except IsADirectoryError:
            raise InvalidRequest(
                f"{self._path(name)} is a directory; remove it first.", code="local_conflict"
            ) from None

    def _leave_out(self, name: str, why: str) -> None:
        if len(self.left_out) < MAX_REPORTED:
            self.left_out.append(f"{name}: {why}")

    def _go(self, parts: tuple[str, ...], mode: int | None = None) -> None:
        """Make this the current directory, and create it if needed with `mode`."""
        if len(parts) > MAX_DEPTH:
            raise _bad(f"it is more than {MAX_DEPTH} levels deep")
        common = 0
        for directory, name in zip(self._stack[1:], parts, strict=False):
            if directory.name != name:
                break
            common += 1
        while len(self._stack) > common + 1:
            self._leave()
        for at in range(common, len(parts)):
            self._down(parts[at], mode if at == len(parts) - 1 else None)

    def _down(self, name: str, mode: int | None) -> None:
        here, made = self._stack[-1].fd, False
        with suppress(FileExistsError):
            os.mkdir(name, 0o777 if mode is None else mode & 0o777 | 0o700, dir_fd=here)
            made = True
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=here)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise InvalidRequest(
                f"{self._path(name)} is a link or a file; remove it first.", code="local_conflict"
            ) from None
        self._stack.append(_OpenDirectory(name, fd, mode if made else None))

    def _leave(self) -> None:
        left = self._stack.pop()
        try:
            # Only now, because entries could not be created in a directory without these rights.
            if left.mode is not None and left.mode & 0o700 != 0o700:
                os.fchmod(left.fd, os.fstat(left.fd).st_mode & 0o077 | left.mode & 0o700)
        finally:
            os.close(left.fd)

    def _path(self, name: str) -> str:
        return "/".join([*(directory.name for directory in self._stack[1:]), name])


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _parts(name: str) -> tuple[str, ...]:
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise InvalidRequest(
            f"{name[:200]!r} is not a path inside the archive.", code="unsafe_name"
        )
    return parts


def _is_inside(target: str, depth: int) -> bool:
    """
    Whether a link at this depth points inside the top directory. `..` is accepted only at the
    beginning, where it leaves real directories. After another name, which may itself be a link, it
    could point anywhere.
    """
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    absolute = target.startswith("/") or not target or "\0" in target
    return not absolute and up <= depth and ".." not in parts[up:]


def _bad(why: str) -> PermanentError:
    return PermanentError(f"The server sent an invalid archive: {why}.", code="bad_answer")
