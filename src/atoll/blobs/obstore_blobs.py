"""
Blobs through obstore, which serves local disk and S3 alike.

obstore is imported, and its threads are started, by the first call that needs them, so that a
server whose data is all small pays for neither.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from atoll.blobs.base import (
    CHUNK_SIZE,
    MAX_GET,
    MAX_OBJECT_SIZE,
    PAGE_SIZE,
    PART_SIZE,
    BlobInfo,
    OpenBlob,
    RefusedByStore,
    UnlistableNames,
    check_expiry,
    check_key,
    check_page,
    check_prefix,
    check_size,
    is_key,
)
from atoll.errors import BlobsUnavailable, TemporaryError, TooLarge

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from datetime import timedelta

    from obstore import ObjectMeta
    from obstore.store import ObjectStore

    from atoll.blobs.base import Method

_PART_CONCURRENCY = 2


class ObstoreBlobs:
    """
    The part that all stores share. `connect` opens the store, in a thread. At most `concurrency`
    calls run at the same time; others wait. A `write` does not count, because it may have to wait
    for its chunks.
    """

    def __init__(self, connect: Callable[[], ObjectStore], *, concurrency: int) -> None:
        self._connect = connect
        self._connected: ObjectStore | None = None
        self._slots = asyncio.Semaphore(concurrency)

    async def put(self, key: str, data: bytes) -> None:
        check_key(key)
        async with self._store(f"write {key}") as store:
            # A multipart upload is not atomic, and on S3 a kill would leave parts that cost money.
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
            writer = open_writer_async(
                store, key, buffer_size=PART_SIZE, max_concurrency=_PART_CONCURRENCY
            )
        try:
            async for chunk in chunks:
                size += len(chunk)
                if size > MAX_OBJECT_SIZE:
                    raise TooLarge(
                        f"Blob {key} is larger than {MAX_OBJECT_SIZE} bytes.",
                        code="blob_too_large",
                    )
                if chunk:
                    with self._translated(what):
                        await writer.write(chunk)
            with self._translated(what):
                await writer.close()
        except BaseException as error:
            # Removes the parts that were sent. The bucket's lifecycle rule removes the rest.
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
                # obstore refuses a range that begins after the end; ours is empty.
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
        async with self._store(f"read {key}") as store:
            try:
                return _info(await store.head_async(key))
            except FileNotFoundError as error:
                self._check_absent(error)
                return None

    async def open(self, key: str, *, start: int = 0, end: int | None = None) -> OpenBlob | None:
        info = await self.head(key)
        if info is None:
            return None
        stop = info.size if end is None else min(end, info.size)
        return OpenBlob(info, self._chunks(info, start, stop))

    async def list(
        self, prefix: str, *, after: str | None = None, limit: int = PAGE_SIZE
    ) -> list[BlobInfo]:
        directory = check_page(prefix, after, limit)
        found: list[BlobInfo] = []
        async with self._store(f"list {prefix}") as store:
            async for page in store.list(directory, offset=after, chunk_size=limit):
                found += [_info(item) for item in page if is_key(item["path"])]
                if len(found) >= limit:
                    break
        return found[:limit]

    async def is_synced(self, prefix: str) -> bool:
        check_prefix(prefix)
        return True

    async def remove(self, key: str, *, deferrable: bool = True) -> None:
        check_key(key)
        async with self._store(f"remove {key}") as store:
            with contextlib.suppress(FileNotFoundError):
                await store.delete_async(key)

    async def remove_all(self, prefix: str, *, deferrable: bool = True) -> None:
        directory = check_prefix(prefix)
        async with self._store(f"remove {prefix}") as store:
            async for page in store.list(directory, chunk_size=PAGE_SIZE):
                with contextlib.suppress(FileNotFoundError):
                    await store.delete_async([item["path"] for item in page])

    async def presign(self, method: Method, key: str, expires: timedelta) -> str | None:
        check_key(key)
        check_expiry(expires)
        return None

    async def _chunks(self, info: BlobInfo, start: int, stop: int) -> AsyncIterator[bytes]:
        from obstore.exceptions import PreconditionError

        # One request per chunk: the time-out is per request, and a slow reader occupies no slot.
        for begin in range(start, stop, CHUNK_SIZE):
            until = min(begin + CHUNK_SIZE, stop)
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
        async with self._slots:
            with self._translated(what):
                yield await self._ready()

    async def _ready(self) -> ObjectStore:
        if self._connected is None:
            # Two concurrent first calls open two stores; either will do.
            self._connected = await asyncio.to_thread(self._connect)
        return self._connected

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        try:
            yield
        except _failures() as error:
            if _is_bad_name(error):
                raise UnlistableNames(
                    f"The blob store cannot {what}: some names in it cannot be listed."
                ) from None
            kind = RefusedByStore if self._is_refusal(error) else BlobsUnavailable
            raise kind(f"The blob store cannot {what}: {self._reason(error)}") from self._cause(
                error
            )

    def _is_refusal(self, error: Exception) -> bool:
        return False

    def _reason(self, error: Exception) -> str:
        # The lines after the first show obstore's own objects.
        return (str(error).splitlines() or [type(error).__name__])[0]

    def _cause(self, error: Exception) -> Exception | None:
        """The error that a traceback may show as the cause."""
        return error

    def _check_absent(self, error: FileNotFoundError) -> None:
        """Raise the error if more than the object is missing, such as the bucket."""


def _info(found: ObjectMeta) -> BlobInfo:
    return BlobInfo(found["path"], found["size"], found["e_tag"] or "", found["last_modified"])


def _is_bad_name(error: Exception) -> bool:
    from obstore.exceptions import InvalidPathError

    return isinstance(error, InvalidPathError)


def _failures() -> tuple[type[Exception], ...]:
    from obstore.exceptions import BaseError

    return OSError, BaseError
