"""
Writes the tar file that an engine builds from: a template's Dockerfile and its build files.

Anyone who may create templates can upload build files, and the engine that unpacks them is root.
Because two programs may read one tar file differently, the engine never gets the uploaded bytes.
They are parsed and checked here, and a plain tar file is written from the result. It contains
files, directories and links; no name occurs twice, lies below a link or leaves the top directory.
Owners and extended attributes are dropped; COPY sets the owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tarfile
import tempfile
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, NoReturn, Self

from atoll.errors import BlobsUnavailable, NodeFull, PermanentError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from atoll.drivers.base import BuildFiles

DOCKERFILE = "Dockerfile"
CHUNK_SIZE = 1024 * 1024
MAX_ENTRIES = 200_000
MAX_NAME = 4096
MAX_DEPTH = 256
MAX_LINK_NAMES = 32 * 1024 * 1024
"""Bytes of the names of all symbolic links, which are kept in memory."""
MAX_HEADER = 64 * 1024
"""Bytes of an extended header."""
MAX_TIME = 8**11 - 1
"""The latest time in a plain header."""
EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


@contextlib.asynccontextmanager
async def build_tar(
    dockerfile: str, build_files: BuildFiles | None, scratch: Path
) -> AsyncIterator[AsyncIterator[bytes]]:
    """The tar file in pieces. The template's Dockerfile replaces one among the build files."""
    data = dockerfile.encode("utf-8", "surrogateescape")
    if build_files is None:
        yield _in_thread(_write(None, data))
        return
    file: IO[bytes] = await asyncio.to_thread(tempfile.TemporaryFile, "w+b", dir=scratch)
    try:
        await _fetch(build_files, file)
        # Completely, before the engine gets the first byte.
        await asyncio.to_thread(_check, file)
        yield _in_thread(_write(file, data))
    finally:
        file.close()


async def _fetch(build_files: BuildFiles, file: IO[bytes]) -> None:
    digest = hashlib.sha256()

    def append(piece: bytes) -> None:
        digest.update(piece)
        file.write(piece)

    pieces = await build_files.open()
    try:
        async for piece in pieces:
            await asyncio.to_thread(append, piece)
    except OSError as error:
        raise NodeFull(f"No space on the node's disk for build files: {error}") from error
    if digest.hexdigest() != build_files.digest:
        raise BlobsUnavailable(
            f"Build files {build_files.digest}: the blob store returned other content."
        )


async def _in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


# Reading


class _Member(tarfile.TarInfo):
    """An entry, without the extensions that programs interpret differently."""

    def _proc_member(self, archive: tarfile.TarFile) -> Self:
        if self.type == tarfile.XGLTYPE:
            raise _invalid("it has a global pax header; pack the files without it")
        if self.type == tarfile.GNUTYPE_SPARSE:
            self._refuse_sparse()
        # `tarfile` reads these into memory before any other check.
        if self.type in EXTENSIONS and not 0 <= self.size <= MAX_HEADER:
            raise _invalid("an extended header is too long")
        member: Self = super()._proc_member(archive)  # type: ignore[misc]
        if "size" in member.pax_headers:
            raise _invalid(f"{member.name[:200]!r} has its size in a pax header")
        return member

    def _refuse_sparse(self, *args: object) -> NoReturn:
        raise _invalid(f"{self.name[:200]!r} is a sparse file")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


def _check(file: IO[bytes]) -> None:
    """Raise `PermanentError` if the build files are not acceptable."""
    for _ in _members(file):
        pass


def _members(file: IO[bytes]) -> Iterator[tuple[str, _Member, tarfile.TarFile]]:
    """The entries with their checked names, without the top directory."""
    file.seek(0)
    names = _EntryNames()
    try:
        with tarfile.open(fileobj=file, mode="r:", tarinfo=_Member) as tar:
            for member in tar:
                assert isinstance(member, _Member)
                name = names.add(member)
                if name != ".":
                    yield name, member, tar
                tar.members.clear()  # type: ignore[attr-defined]
            file.seek(tar.offset)
            # `tarfile` treats an unreadable header as the end, too.
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise _invalid("it is damaged")
    except (tarfile.TarError, UnicodeError, ValueError, OverflowError, RecursionError) as error:
        raise _invalid(f"it is not a complete, uncompressed tar file ({error})") from error


class _EntryNames:
    """The names of the entries read so far."""

    def __init__(self) -> None:
        self._links: set[str] = set()
        self._links_size = 0
        self._is_file: dict[bytes, bool] = {}
        """By digest, because the names of all entries could take much memory."""

    def add(self, member: _Member) -> str:
        """The name, relative and normalized. Raises `PermanentError`."""
        name = _relative(member.name)
        shown = repr(member.name[:200])
        if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
            raise _invalid(f"{shown} is neither a file, a directory nor a link")
        parents = [str(parent) for parent in PurePosixPath(name).parents]
        if not self._links.isdisjoint(parents):
            raise _invalid(f"{shown} is below a link")
        if DOCKERFILE in parents or (name == DOCKERFILE and member.isdir()):
            raise _invalid(f"{DOCKERFILE} is a directory")
        if member.islnk():
            target = _relative(member.linkname)
            # The Dockerfile among the build files is left out, so it cannot be a target.
            if target == DOCKERFILE or not self._is_file.get(_digest(target)):
                raise _invalid(f"{shown} is a hard link, but its target is not an earlier file")
        digest = _digest(name)
        if digest in self._is_file and not (member.isdir() and not self._is_file[digest]):
            raise _invalid(f"{shown} occurs twice")
        if len(self._is_file) >= MAX_ENTRIES:
            raise _invalid(f"it has more than {MAX_ENTRIES} entries")
        self._is_file[digest] = member.isfile() or member.islnk()
        if member.issym():
            self._add_link(name, member)
        return name

    def _add_link(self, name: str, member: _Member) -> None:
        if name == ".":
            raise _invalid("its top directory is a link")
        if "\0" in member.linkname or len(member.linkname) > MAX_NAME:
            raise _invalid(f"the target of {member.name[:200]!r} is not a path")
        self._links.add(name)
        self._links_size += len(name)
        if self._links_size > MAX_LINK_NAMES:
            raise _invalid("it has too many links")


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _relative(name: str) -> str:
    if len(name) > MAX_NAME or "\0" in name:
        raise _invalid(f"{name[:200]!r} is too long, or not a path")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise _invalid(f"{name[:200]!r} leaves the top directory")
    if len(path.parts) > MAX_DEPTH:
        raise _invalid(f"{name[:200]!r} is more than {MAX_DEPTH} directories deep")
    return str(path)


# Writing


def _write(file: IO[bytes] | None, dockerfile: bytes) -> Iterator[bytes]:
    """The new tar file, in pieces of about `CHUNK_SIZE` bytes."""
    buffer = bytearray()
    for part in _parts(file, dockerfile):
        buffer += part
        if len(buffer) >= CHUNK_SIZE:
            yield bytes(buffer)
            buffer.clear()
    yield bytes(buffer)


def _parts(file: IO[bytes] | None, dockerfile: bytes) -> Iterator[bytes]:
    first = tarfile.TarInfo(DOCKERFILE)
    first.size = len(dockerfile)
    yield _header(first)
    yield dockerfile + _padding(first.size)
    for name, member, tar in _members(file) if file is not None else ():
        if name == DOCKERFILE:
            continue
        yield _header(_plain(name, member))
        if member.isreg():
            content = tar.extractfile(member)
            assert content is not None
            while piece := content.read(CHUNK_SIZE):
                yield piece
            yield _padding(member.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _plain(name: str, member: _Member) -> tarfile.TarInfo:
    plain = tarfile.TarInfo(name)
    plain.mode = member.mode & 0o7777
    plain.mtime = min(max(int(member.mtime), 0), MAX_TIME)
    if member.isreg():
        plain.size = member.size
    elif member.isdir():
        plain.type = tarfile.DIRTYPE
    else:
        plain.type = tarfile.SYMTYPE if member.issym() else tarfile.LNKTYPE
        plain.linkname = member.linkname if member.issym() else _relative(member.linkname)
    return plain


def _header(member: tarfile.TarInfo) -> bytes:
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def _invalid(reason: str) -> PermanentError:
    return PermanentError(f"build_context: {reason}.", code="build_context_invalid")
