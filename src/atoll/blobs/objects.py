"""
Blobs by obstore, which speaks to local disk and to S3 alike.

obstore is imported and its threads (one a core, and those of its blocking work) are started by the
first call that needs them, so that a server whose data is all small pays for neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from typing import TYPE_CHECKING

from atoll.blobs.base import check_key, check_prefix
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from obstore.store import ObjectStore

    from atoll.blobs.base import Blobs
    from atoll.settings import Settings


class Objects:
    """
    What is the same for every kind of store: `connect` makes it, in a thread, and so many calls as
    `at_once` says are with it at the same time; others wait.
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

    async def get(self, key: str, *, start: int = 0, end: int | None = None) -> bytes | None:
        check_key(key)
        async with self._store(f"read {key}") as store:
            try:
                if start == 0 and end is None:
                    found = await store.get_async(key)
                    return bytes(await found.bytes_async())
                # A range that begins behind the end is an error there, and empty here.
                size = (await store.head_async(key))["size"]
                stop = size if end is None else min(end, size)
                if start >= stop:
                    return b""
                return bytes(await store.get_range_async(key, start=start, end=stop))
            except FileNotFoundError:
                return None

    async def remove(self, key: str) -> None:
        check_key(key)
        async with self._store(f"remove {key}") as store:
            with contextlib.suppress(FileNotFoundError):
                await store.delete_async(key)

    async def remove_all(self, prefix: str) -> None:
        directory = check_prefix(prefix)
        async with self._store(f"remove {prefix}") as store:
            async for page in store.list(directory, chunk_size=1000):
                with contextlib.suppress(FileNotFoundError):
                    await store.delete_async([item["path"] for item in page])

    @contextlib.asynccontextmanager
    async def _store(self, what: str) -> AsyncIterator[ObjectStore]:
        async with self._turns:
            with _translated(what):
                if self._connected is None:
                    # Two first calls at once make two; either will do.
                    self._connected = await asyncio.to_thread(self._connect)
                yield self._connected


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

    async def remove_all(self, prefix: str) -> None:
        path = self._directory / check_prefix(prefix)
        with _translated(f"remove {prefix}"):
            await asyncio.to_thread(_remove_tree, path)

    def _local_store(self) -> ObjectStore:
        from obstore.store import LocalStore

        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Empty directories stay: a put beside the last removal would lose its own.
        return LocalStore(self._directory)


def choose(settings: Settings) -> Blobs:
    """Where these settings keep blobs; nothing is opened yet."""
    return LocalObjects(settings.data_dir / "blobs")


def _remove_tree(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except _failures() as error:
        # Behind the first line is how obstore's own objects look.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TemporaryError(
            f"The blob store cannot {what}: {reason}", code="blobs_unavailable"
        ) from error


def _failures() -> tuple[type[Exception], ...]:
    from obstore.exceptions import BaseError

    return OSError, BaseError
