"""
The tar that an engine builds from: a template's context, looked through, with its Dockerfile.

A context is written by whoever may make templates, and unpacked by an engine that is root. So it
is a plain tar of files, directories and links, none of them beneath a link or outside the top; an
engine unpacks it apart from its own files besides. It is not compressed: a small one stays small.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tarfile
import tempfile
from pathlib import PurePosixPath
from typing import IO, TYPE_CHECKING, Self

from atoll.errors import PermanentError, TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.drivers.base import BuildContext

DOCKERFILE = "Dockerfile"
PIECE = 1024 * 1024
MOST_ENTRIES = 200_000
INVALID = "build_context_invalid"
EXTENSIONS = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
MOST_EXTENSION = 64 * 1024
"""Bytes of what is told of an entry before it."""


@contextlib.asynccontextmanager
async def packed(
    dockerfile: str, context: BuildContext | None, scratch: Path
) -> AsyncIterator[AsyncIterator[bytes]]:
    """The tar in pieces. A Dockerfile that the context has gives way to the template's."""
    entry = _entry(dockerfile)
    if context is None:
        yield _pieces(None, 0, entry)
        return
    file: IO[bytes] = await asyncio.to_thread(tempfile.TemporaryFile, "w+b", dir=scratch)
    try:
        await _fetch(context, file)
        end = await asyncio.to_thread(checked, file)
        yield _pieces(file, end, entry)
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
        raise TemporaryError(
            f"There is no room for the build context: {error}", code="node_full"
        ) from error
    if found.hexdigest() != context.digest:
        raise TemporaryError(
            f"The build context {context.digest} was not read as it was stored.",
            code="blobs_unavailable",
        )


async def _pieces(file: IO[bytes] | None, end: int, entry: bytes) -> AsyncIterator[bytes]:
    """What is before `end`, and the Dockerfile behind it: of two of a name the last counts."""
    if file is not None:
        await asyncio.to_thread(file.seek, 0)
        while end > 0:
            piece = await asyncio.to_thread(file.read, min(PIECE, end))
            if not piece:
                break
            end -= len(piece)
            yield piece
    yield entry + bytes(2 * tarfile.BLOCKSIZE)


def _entry(dockerfile: str) -> bytes:
    data = dockerfile.encode("utf-8", "surrogateescape")
    info = tarfile.TarInfo(DOCKERFILE)
    info.size = len(data)
    return info.tobuf() + data + bytes(-len(data) % tarfile.BLOCKSIZE)


class Member(tarfile.TarInfo):
    def _proc_member(self, archive: tarfile.TarFile) -> Self:
        # Read whole before anything of it is looked at.
        if self.type in EXTENSIONS and not 0 <= self.size <= MOST_EXTENSION:
            raise _invalid("the head of an entry is too long")
        member: Self = super()._proc_member(archive)  # type: ignore[misc]
        return member


def checked(file: IO[bytes]) -> int:
    """Where the entries of the tar end; raises `PermanentError` when it is not to be built from."""
    file.seek(0)
    links: set[str] = set()
    count = 0
    try:
        with tarfile.open(fileobj=file, mode="r:", tarinfo=Member) as tar:
            for member in tar:
                count += 1
                if count > MOST_ENTRIES:
                    raise _invalid(f"it has more than {MOST_ENTRIES} entries")
                _check(member, links)
                tar.members.clear()  # type: ignore[attr-defined]
            end = tar.offset
            file.seek(end)
            # What cannot be read, behind something that can, is the end too for this module.
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise _invalid("it is damaged")
            return end
    except (tarfile.TarError, UnicodeError, ValueError, OverflowError, RecursionError) as error:
        raise _invalid(f"it is not a whole tar without compression ({error})") from error


def _check(member: tarfile.TarInfo, links: set[str]) -> None:
    name = _inside(member.name)
    if member.issparse() or not (
        member.isfile() or member.isdir() or member.issym() or member.islnk()
    ):
        raise _invalid(f"{member.name[:200]!r} is neither file, directory nor link")
    if member.islnk():
        _inside(member.linkname)
    if any(str(parent) in links for parent in PurePosixPath(name).parents):
        raise _invalid(f"{member.name[:200]!r} is beneath a link")
    if member.issym():
        links.add(name)
    else:
        links.discard(name)


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise _invalid(f"{name[:200]!r} is outside it")
    return str(path)


def _invalid(why: str) -> PermanentError:
    return PermanentError(f"build_context: {why}.", code=INVALID)
