"""
Blobs by obstore, which speaks to local disk and to S3 alike.

obstore is imported and its threads (one a core, and those of its blocking work) are started by the
first call that needs them, so that a server whose data is all small pays for neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from typing import TYPE_CHECKING

from atoll.blobs.base import (
    LARGEST,
    MAX_GET,
    PAGE,
    PART,
    PIECE,
    BlobInfo,
    Opened,
    Refused,
    UnlistableNames,
    check_expiry,
    check_key,
    check_page,
    check_prefix,
    check_size,
    is_key,
)
from atoll.blobs.tree import walk
from atoll.errors import BlobsUnavailable, TemporaryError, TooLarge

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from datetime import timedelta
    from pathlib import Path

    from obstore import ObjectMeta
    from obstore.store import ObjectStore

    from atoll.blobs.base import Method

_PARTS_AT_ONCE = 2


class Objects:
    """
    What is the same for every kind of store: `connect` makes it, in a thread, and so many calls as
    `at_once` says are with it at the same time; others wait. A `write` needs no turn, because it
    may have to wait for its chunks.
    """

    def __init__(self, connect: Callable[[], ObjectStore], *, at_once: int) -> None:
        self._connect = connect
        self._connected: ObjectStore | None = None
        self._turns = asyncio.Semaphore(at_once)

    async def put(self, key: str, data: bytes) -> None:
        check_key(key)
        async with self._store(f"write {key}") as store:
            # In parts it would not be one write, and on S3 a kill would leave parts that cost.
            await store.put_async(key, data, use_multipart=False)

    async def create(self, key: str, data: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError

        check_key(key)
        async with self._store(f"write {key}") as store:
            try:
                await store.put_async(key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
            return True

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> int:
        from obstore import open_writer_async

        check_key(key)
        what, size = f"write {key}", 0
        with self._translated(what):
            store = await self._ready()
            writer = open_writer_async(store, key, buffer_size=PART, max_concurrency=_PARTS_AT_ONCE)
        try:
            async for chunk in chunks:
                size += len(chunk)
                if size > LARGEST:
                    raise TooLarge(
                        f"A blob has at most {LARGEST} bytes, and {key} has more.",
                        code="blob_too_large",
                    )
                if chunk:
                    with self._translated(what):
                        await writer.write(chunk)
            with self._translated(what):
                await writer.close()
        except BaseException as error:
            # Takes back the parts that were sent. What it cannot, the bucket's own rule removes.
            with contextlib.suppress(*_failures()):
                await writer.__aexit__(type(error), error, error.__traceback__)
            raise
        return size

    async def get(
        self, key: str, *, start: int = 0, end: int | None = None, limit: int = MAX_GET
    ) -> bytes | None:
        check_key(key)
        async with self._store(f"read {key}") as store:
            try:
                if start == 0 and end is None:
                    found = await store.get_async(key)
                    check_size(key, found.meta["size"], limit)
                    return bytes(await found.bytes_async())
                # A range that begins behind the end is an error there, and empty here.
                size = (await store.head_async(key))["size"]
                stop = size if end is None else min(end, size)
                if start >= stop:
                    return b""
                check_size(key, stop - start, limit)
                return bytes(await store.get_range_async(key, start=start, end=stop))
            except FileNotFoundError as error:
                self._check_absent(error)
                return None

    async def head(self, key: str) -> BlobInfo | None:
        check_key(key)
        async with self._store(f"look at {key}") as store:
            try:
                return _info(await store.head_async(key))
            except FileNotFoundError as error:
                self._check_absent(error)
                return None

    async def open(self, key: str, *, start: int = 0, end: int | None = None) -> Opened | None:
        info = await self.head(key)
        if info is None:
            return None
        stop = info.size if end is None else min(end, info.size)
        return Opened(info, self._pieces(info, start, stop))

    async def list(
        self, prefix: str, *, after: str | None = None, limit: int = PAGE
    ) -> list[BlobInfo]:
        directory = check_page(prefix, after, limit)
        found: list[BlobInfo] = []
        async with self._store(f"list {prefix}") as store:
            async for page in store.list(directory, offset=after, chunk_size=limit):
                found += [_info(item) for item in page if is_key(item["path"])]
                if len(found) >= limit:
                    break
        return found[:limit]

    async def is_home(self, prefix: str) -> bool:
        check_prefix(prefix)
        return True

    async def remove(self, key: str, *, later: bool = True) -> None:
        check_key(key)
        async with self._store(f"remove {key}") as store:
            with contextlib.suppress(FileNotFoundError):
                await store.delete_async(key)

    async def remove_all(self, prefix: str, *, later: bool = True) -> None:
        directory = check_prefix(prefix)
        async with self._store(f"remove {prefix}") as store:
            async for page in store.list(directory, chunk_size=PAGE):
                with contextlib.suppress(FileNotFoundError):
                    await store.delete_async([item["path"] for item in page])

    async def presign(self, method: Method, key: str, expires: timedelta) -> str | None:
        check_key(key)
        check_expiry(expires)
        return None

    async def _pieces(self, info: BlobInfo, start: int, stop: int) -> AsyncIterator[bytes]:
        from obstore.exceptions import PreconditionError

        # A request for each: the time-out is for one request, and no slow reader holds a turn.
        for begin in range(start, stop, PIECE):
            until = min(begin + PIECE, stop)
            async with self._store(f"read {info.key}") as store:
                try:
                    found = await store.get_async(
                        info.key, options={"range": (begin, until), "if_match": info.etag}
                    )
                    piece = bytes(await found.bytes_async())
                except (FileNotFoundError, PreconditionError):
                    raise TemporaryError(
                        f"The blob {info.key} was replaced or removed while it was read.",
                        code="blob_changed",
                    ) from None
            yield piece

    @contextlib.asynccontextmanager
    async def _store(self, what: str) -> AsyncIterator[ObjectStore]:
        async with self._turns:
            with self._translated(what):
                yield await self._ready()

    async def _ready(self) -> ObjectStore:
        if self._connected is None:
            # Two first calls at once make two; either will do.
            self._connected = await asyncio.to_thread(self._connect)
        return self._connected

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except _failures() as error:
            if _is_bad_name(error):
                raise UnlistableNames(
                    f"The blob store cannot {what}: some names there cannot be listed."
                ) from None
            kind = Refused if self._is_refusal(error) else BlobsUnavailable
            raise kind(f"The blob store cannot {what}: {self._reason(error)}") from self._cause(
                error
            )

    def _is_refusal(self, error: Exception) -> bool:
        return False

    def _reason(self, error: Exception) -> str:
        # Behind the first line is how obstore's own objects look.
        return (str(error).splitlines() or [type(error).__name__])[0]

    def _cause(self, error: Exception) -> Exception | None:
        """What a traceback may show beside our own error."""
        return error

    def _check_absent(self, error: FileNotFoundError) -> None:
        """Raise the error when it is not the object alone that is not there."""


class LocalObjects(Objects):
    """
    Files beneath a directory that only its owner may enter.

    A put writes `<key>#<number>` and renames it; it does not wait for the disk. A process that is
    killed in between leaves that file, which is no key and which `list` does not show.
    """

    def __init__(self, directory: Path) -> None:
        # obstore has a thread for every call on files that is under way.
        super().__init__(self._local_store, at_once=8)
        self._directory = directory

    async def list(
        self, prefix: str, *, after: str | None = None, limit: int = PAGE
    ) -> list[BlobInfo]:
        directory = check_page(prefix, after, limit)

        def first() -> list[BlobInfo]:
            keys = (one for one in walk(self._directory, directory, after) if is_key(one.key))
            return list(itertools.islice(keys, limit))

        with self._translated(f"list {prefix}"):
            return await asyncio.to_thread(first)

    async def remove_all(self, prefix: str, *, later: bool = True) -> None:
        path = self._directory / check_prefix(prefix)
        with self._translated(f"remove {prefix}"):
            await asyncio.to_thread(_remove_tree, path)

    def _local_store(self) -> ObjectStore:
        from obstore.store import LocalStore

        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Empty directories stay: a put beside the last removal would lose its own.
        return LocalStore(self._directory)


def _info(found: ObjectMeta) -> BlobInfo:
    return BlobInfo(found["path"], found["size"], found["e_tag"] or "", found["last_modified"])


def _remove_tree(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def _is_bad_name(error: Exception) -> bool:
    from obstore.exceptions import InvalidPathError

    return isinstance(error, InvalidPathError)


def _failures() -> tuple[type[Exception], ...]:
    from obstore.exceptions import BaseError

    return OSError, BaseError
