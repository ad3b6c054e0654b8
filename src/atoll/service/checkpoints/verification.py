"""
Verifies that everything that a manifest names is in the blob store, undamaged.

Missing objects are found by listing, before anything is read. Then each page and object is read and
must match its digest, and each part of a file must lie within an object of the manifest. Only a few
objects are in memory at a time, and verification may be cancelled at any await.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from atoll.blobs.base import PAGE_SIZE
from atoll.errors import CheckpointDamaged, PermanentError
from atoll.model.manifest import MAX_OBJECT
from atoll.model.manifest_parser import read_page
from atoll.service.checkpoints.chunks import AT_ONCE, data_of, stored
from atoll.service.checkpoints.restore import first

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.blobs.base import Blobs
    from atoll.model.manifest import Manifest

MAX_NAMED = 5
"""Objects that a message names; very many may be damaged."""


class Verification:
    def __init__(self, blobs: Blobs, session_id: str, manifest: Manifest) -> None:
        self._blobs = blobs
        self._session_id = session_id
        self._data = data_of(session_id)
        self._manifest = manifest
        self._pages = [name for _, name in manifest.pages]

    async def run(self) -> None:
        """Raise `CheckpointDamaged` with the names of some damaged objects."""
        self._raise(await self._missing(), "missing")
        todo = iter([*self._pages, *self._manifest.objects])
        damaged: list[str] = []
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(self._read(todo, damaged))
        except ExceptionGroup as errors:
            raise first(errors) from None
        self._raise(damaged, "damaged")

    async def _missing(self) -> list[str]:
        """Objects that are missing or have a wrong size."""
        objects = self._manifest.objects
        wanted = set(self._pages) | objects.keys()
        after: str | None = None
        while wanted:
            listed = await self._blobs.list(self._data, after=after)
            for info in listed:
                name = info.key.removeprefix(self._data)
                size = objects[name][1] if name in objects else info.size
                if info.size == size and size <= MAX_OBJECT:
                    wanted.discard(name)
            if len(listed) < PAGE_SIZE:
                break
            after = listed[-1].key
        return sorted(wanted)

    async def _read(self, todo: Iterator[str], damaged: list[str]) -> None:
        pages = set(self._pages)
        for name in todo:
            try:
                data = await stored(self._blobs, self._data + name, name, MAX_OBJECT)
                intact = name not in pages or await asyncio.to_thread(self._is_consistent, data)
            except PermanentError:
                intact = False
            if not intact:
                damaged.append(name)
            if len(damaged) > MAX_NAMED:
                return

    def _is_consistent(self, page: bytes) -> bool:
        objects = self._manifest.objects
        return all(
            part.object is None
            or (part.object in objects and part.offset + part.length <= objects[part.object][1])
            for entry in read_page(page)
            for part in entry.parts
        )

    def _raise(self, names: list[str], how: str) -> None:
        if names:
            shown = ", ".join(names[:MAX_NAMED]) + (", …" if len(names) > MAX_NAMED else "")
            raise CheckpointDamaged(
                f"Checkpoint {self._manifest.number} of session {self._session_id} is unusable. "
                f"Objects {how} in the blob store: {shown}",
            )
