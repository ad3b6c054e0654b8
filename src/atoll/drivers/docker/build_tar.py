"""
The tar that an engine builds from: a template's Dockerfile and its build files, written anew.

Build files are uploaded by anybody who may make templates, and unpacked by an engine that is root.
Two programs may read one tar differently, so the engine never gets the uploaded bytes: they are
parsed and checked here, and a plain tar is written from what was parsed. It has files, directories
and links, each name once, none of them beneath a link or outside the top. Owners and extended
attributes are not kept; COPY sets the owner.
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

    from atoll.drivers.base import BuildContext

DOCKERFILE = "Dockerfile"
PIECE = 1024 * 1024
MAX_ENTRIES = 200_000
MAX_NAME = 4096
MAX_DEPTH = 256
MAX_LINK_NAMES = 32 * 1024 * 1024
"""Bytes of the names of all symbolic links, which are kept in memory."""
MAX_HEADER = 64 * 1024
"""Bytes of an extended header."""
MAX_TIME = 8**11 - 1
"""The latest time that a plain header can hold."""
INVALID = "build_context_invalid"
EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


@contextlib.asynccontextmanager
async def packed(
    dockerfile: str, context: BuildContext | None, scratch: Path
) -> AsyncIterator[AsyncIterator[bytes]]:
    """The tar in pieces. A Dockerfile among the build files is left out for the template's."""
    data = dockerfile.encode("utf-8", "surrogateescape")
    if context is None:
        yield _in_thread(_written(None, data))
        return
    file: IO[bytes] = await asyncio.to_thread(tempfile.TemporaryFile, "w+b", dir=scratch)
    try:
        await _fetch(context, file)
        # Read to its end before the engine gets the first byte.
        await asyncio.to_thread(check, file)
        yield _in_thread(_written(file, data))
    finally:
        file.close()


async def _fetch(context: BuildContext, file: IO[bytes]) -> None:
    found = hashlib.sha256()

    def keep(piece: bytes) -> None:
        found.update(piece)
        file.write(piece)

    pieces = await context.open()
    try:
        async for piece in pieces:
            await asyncio.to_thread(keep, piece)
    except OSError as error:
        raise NodeFull(f"There is no room for the build context: {error}") from error
    if found.hexdigest() != context.digest:
        raise BlobsUnavailable(
            f"The build context {context.digest} was not read as it was stored.",
        )


async def _in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


# Reading


class StrictTarInfo(tarfile.TarInfo):
    """An entry without the extensions that programs read differently."""

    def _proc_member(self, archive: tarfile.TarFile) -> Self:
        if self.type == tarfile.XGLTYPE:
            raise _invalid("it has a global pax header; pack the files without it")
        if self.type == tarfile.GNUTYPE_SPARSE:
            self._refuse_sparse()
        # Read whole before anything of it is looked at.
        if self.type in EXTENSIONS and not 0 <= self.size <= MAX_HEADER:
            raise _invalid("an extended header is too long")
        member: Self = super()._proc_member(archive)  # type: ignore[misc]
        if "size" in member.pax_headers:
            raise _invalid(f"{member.name[:200]!r} has its size in a pax header")
        return member

    def _refuse_sparse(self, *given: object) -> NoReturn:
        raise _invalid(f"{self.name[:200]!r} is a sparse file")

    _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _refuse_sparse


def check(file: IO[bytes]) -> None:
    """Raise `PermanentError` when an image is not to be built from this tar."""
    for _ in _members(file):
        pass


def _members(file: IO[bytes]) -> Iterator[tuple[str, StrictTarInfo, tarfile.TarFile]]:
    """The entries with their checked names; the top directory itself is left out."""
    file.seek(0)
    names = _EntryNames()
    try:
        with tarfile.open(fileobj=file, mode="r:", tarinfo=StrictTarInfo) as tar:
            for member in tar:
                assert isinstance(member, StrictTarInfo)
                name = names.add(member)
                if name != ".":
                    yield name, member, tar
                tar.members.clear()  # type: ignore[attr-defined]
            file.seek(tar.offset)
            # What cannot be read, behind something that can, is the end too for `tarfile`.
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise _invalid("it is damaged")
    except (tarfile.TarError, UnicodeError, ValueError, OverflowError, RecursionError) as error:
        raise _invalid(f"it is not a complete tar without compression ({error})") from error


class _EntryNames:
    """What the entries so far are called."""

    def __init__(self) -> None:
        self._links: set[str] = set()
        self._links_size = 0
        self._seen: dict[bytes, bool] = {}
        """By digest, whether it is a regular file: names of all entries may take much memory."""

    def add(self, member: StrictTarInfo) -> str:
        """The name, relative and normal. Raises `PermanentError`."""
        name = _inside(member.name)
        shown = repr(member.name[:200])
        if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
            raise _invalid(f"{shown} is neither file, directory nor link")
        parents = [str(parent) for parent in PurePosixPath(name).parents]
        if not self._links.isdisjoint(parents):
            raise _invalid(f"{shown} is beneath a link")
        if DOCKERFILE in parents or (name == DOCKERFILE and member.isdir()):
            raise _invalid(f"{DOCKERFILE} is a directory")
        if member.islnk():
            target = _inside(member.linkname)
            # The Dockerfile among the build files is left out, so nothing can be linked to it.
            if target == DOCKERFILE or not self._seen.get(_digest(target)):
                raise _invalid(f"{shown} is a hard link to something other than a file before it")
        digest = _digest(name)
        if digest in self._seen and not (member.isdir() and not self._seen[digest]):
            raise _invalid(f"{shown} is there twice")
        if len(self._seen) >= MAX_ENTRIES:
            raise _invalid(f"it has more than {MAX_ENTRIES} entries")
        self._seen[digest] = member.isfile() or member.islnk()
        if member.issym():
            if name == ".":
                raise _invalid("its top is a link")
            if "\0" in member.linkname or len(member.linkname) > MAX_NAME:
                raise _invalid(f"the target of {shown} is not a path")
            self._links.add(name)
            self._links_size += len(name)
            if self._links_size > MAX_LINK_NAMES:
                raise _invalid("it has too many links")
        return name


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _inside(name: str) -> str:
    if len(name) > MAX_NAME or "\0" in name:
        raise _invalid(f"{name[:200]!r} is too long, or not a path")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise _invalid(f"{name[:200]!r} is outside it")
    if len(path.parts) > MAX_DEPTH:
        raise _invalid(f"{name[:200]!r} is more than {MAX_DEPTH} directories deep")
    return str(path)


# Writing


def _written(file: IO[bytes] | None, dockerfile: bytes) -> Iterator[bytes]:
    """The new tar, in pieces of about `PIECE` bytes."""
    waiting = bytearray()
    for part in _parts(file, dockerfile):
        waiting += part
        if len(waiting) >= PIECE:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


def _parts(file: IO[bytes] | None, dockerfile: bytes) -> Iterator[bytes]:
    own = tarfile.TarInfo(DOCKERFILE)
    own.size = len(dockerfile)
    yield _header(own)
    yield dockerfile + _padding(own.size)
    for name, member, tar in _members(file) if file is not None else ():
        if name == DOCKERFILE:
            continue
        yield _header(_plain(name, member))
        if member.isreg():
            content = tar.extractfile(member)
            assert content is not None
            while piece := content.read(PIECE):
                yield piece
            yield _padding(member.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _plain(name: str, member: StrictTarInfo) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.mode = member.mode & 0o7777
    made.mtime = min(max(int(member.mtime), 0), MAX_TIME)
    if member.isreg():
        made.size = member.size
    elif member.isdir():
        made.type = tarfile.DIRTYPE
    else:
        made.type = tarfile.SYMTYPE if member.issym() else tarfile.LNKTYPE
        made.linkname = member.linkname if member.issym() else _inside(member.linkname)
    return made


def _header(member: tarfile.TarInfo) -> bytes:
    return member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _padding(size: int) -> bytes:
    return bytes(-size % tarfile.BLOCKSIZE)


def _invalid(why: str) -> PermanentError:
    return PermanentError(f"build_context: {why}.", code=INVALID)
