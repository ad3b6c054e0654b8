"""Blobs as files beneath a directory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from typing import TYPE_CHECKING

from atoll.blobs.base import PAGE_SIZE, BlobInfo, check_page, check_prefix, is_key
from atoll.blobs.local_listing import walk
from atoll.blobs.obstore_blobs import ObstoreBlobs

if TYPE_CHECKING:
    from pathlib import Path

    from obstore.store import ObjectStore


class LocalBlobs(ObstoreBlobs):
    """
    Files beneath a directory that only its owner may enter.

    A put writes `<key>#<number>` and renames it, without waiting for the disk. A process that is
    killed in between leaves that file behind, which is not a key and is not listed.
    """

    def __init__(self, directory: Path) -> None:
        # obstore uses a thread for every file operation in progress.
        super().__init__(self._local_store, concurrency=8)
        self._directory = directory

    async def list(
        self, prefix: str, *, after: str | None = None, limit: int = PAGE_SIZE
    ) -> list[BlobInfo]:
        directory = check_page(prefix, after, limit)

        def first() -> list[BlobInfo]:
            keys = (one for one in walk(self._directory, directory, after) if is_key(one.key))
            return list(itertools.islice(keys, limit))

        with self._translated(f"list {prefix}"):
            return await asyncio.to_thread(first)

    async def remove_all(self, prefix: str, *, deferrable: bool = True) -> None:
        path = self._directory / check_prefix(prefix)
        with self._translated(f"remove {prefix}"):
            await asyncio.to_thread(_remove_tree, path)

    def _local_store(self) -> ObjectStore:
        from obstore.store import LocalStore

        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Empty directories stay: a concurrent put would otherwise lose its own.
        return LocalStore(self._directory)


def _remove_tree(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
