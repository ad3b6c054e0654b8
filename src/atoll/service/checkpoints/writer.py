"""
Takes a checkpoint: stores what changed since the previous one, and refers to its objects otherwise.

The executor and the previous checkpoint list all entries in the same order, so both lists are
merged, a window at a time; neither is ever in memory completely. Small files share objects. Large
files are split at fixed offsets, so that a change in the middle stores one piece. An object of
which less than half is still used is not referred to again: the used part is stored once more.

Everything the executor sends is validated: a `ProtocolViolation` ends its link, and no checkpoint
is taken. User code chooses the number of names, their length and the number of holes, so each has a
limit; what exceeds it is left out, and the checkpoint is marked as cut.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from atoll.link.errors import ProtocolViolation
from atoll.model.manifest import (
    FILE,
    MAX_OBJECT,
    Entry,
    Manifest,
    PageWriter,
)
from atoll.service.checkpoints.chunks import AT_ONCE, digest
from atoll.service.checkpoints.incoming_file import IncomingFile, place_parts
from atoll.service.checkpoints.scan import number_of, parse_entry, parse_line, scan, violation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.link.client import Link
    from atoll.service.checkpoints.chunks import ChunkStore

WINDOW = 2000
"""Entries that are processed together."""
WINDOW_TEXT = 4 * 2**20
"""Characters of their paths, which are sent in one request."""
WINDOW_SIZE = 512 * 2**20
"""Bytes of their files, each 8 KiB of which may be a piece of data and a hole."""
MAX_ENTRIES = 5_000_000
"""Code that creates directories during the scan could make it endless."""
MAX_LINE = 2**20
"""Bytes of one entry in the executor's list."""
SMALL = 128 * 1024
"""Bytes of data up to which a file shares an object with others."""
MAX_READS = 3
"""Of a file that changes while it is read."""
DEDUPLICATED = 10_000
"""Small files that later files with the same content can refer to."""


@dataclass(slots=True)
class _Pack:
    """An object of small files; it has no name until it is complete."""

    data: bytearray = field(default_factory=bytearray)
    name: str = ""


class CheckpointWriter:
    def __init__(self, link: Link, objects: ChunkStore, before: Manifest | None) -> None:
        self._link = link
        self._objects = objects
        self._before = before
        self._sparse = _mostly_unused(before)
        self._pack = _Pack()
        self._same: OrderedDict[str, tuple[_Pack, int]] = OrderedDict()
        self._writes: set[asyncio.Task[None]] = set()
        self._sizes: dict[str, int] = (
            {} if before is None else {name: size for name, (_, size) in before.objects.items()}
        )
        self._used: dict[str, int] = {}
        self._pages: list[tuple[str, str]] = []
        self.entries = 0
        self.files = 0
        self.size = 0
        self.stored = 0
        """Bytes written to the blob store."""
        self.changed = before is None
        """Whether the workspace differs from the previous checkpoint."""
        self.settled = True
        """Whether no file changed while it was read."""
        self.cut = False
        """Whether something was left out because of a limit."""
        self.moment = False
        """Whether user code was frozen while the list of files was made."""

    async def run(self) -> None:
        if self._before is not None:
            self._objects.add_known(self._before.objects)
            self._objects.add_known(name for _, name in self._before.pages)
        writer = PageWriter()
        window: list[tuple[Entry, Entry | None]] = []
        text = size = 0
        try:
            async for pair in self._compared():
                window.append(pair)
                text += len(pair[0].path)
                size += pair[0].size
                if len(window) >= WINDOW or text >= WINDOW_TEXT or size >= WINDOW_SIZE:
                    await self._window(window, writer)
                    window, text, size = [], 0, 0
            await self._window(window, writer)
            await self._page(writer.end())
            await self._wait_for_writes(0)
        except ProtocolViolation as error:
            self._link.violated(error)
            raise
        finally:
            for task in self._writes:
                task.cancel()
            await asyncio.gather(*self._writes, return_exceptions=True)
        if self._before is not None and tuple(self._pages) != self._before.pages:
            self.changed = True

    @property
    def unused(self) -> set[str]:
        """Objects of the previous checkpoint, or of repeated reads, that this one does not use."""
        return self._sizes.keys() - self._used.keys()

    def manifest(self, session_id: str, number: int, created_at: str, settled: bool) -> Manifest:
        return Manifest(
            session_id=session_id,
            number=number,
            created_at=created_at,
            files=self.files,
            size=self.size,
            pages=tuple(self._pages),
            objects={name: (used, self._sizes[name]) for name, used in self._used.items()},
            cut=self.cut,
            moment=self.moment,
            settled=settled and self.settled,
        )

    # Comparison with the previous checkpoint

    async def _compared(self) -> AsyncIterator[tuple[Entry, Entry | None]]:
        old = self._old()
        known = await anext(old, None)
        last: list[str] = []
        seen = 0
        async for entry in self._scanned():
            seen += 1
            if seen > MAX_ENTRIES:
                self.cut = True
                return
            order = entry.order
            if order <= last:
                raise violation(f"{entry.path!r} after {'/'.join(last)!r}")
            last = order
            while known is not None and known.order < order:
                known = await anext(old, None)
            if known is not None and known.path == entry.path:
                yield entry, known
            else:
                yield entry, None

    async def _old(self) -> AsyncIterator[Entry]:
        if self._before is None:
            return
        for _, name in self._before.pages:
            for entry in await self._objects.page(name):
                yield entry

    async def _scanned(self) -> AsyncIterator[Entry]:
        rest = b""
        async for item in scan(self._link):
            if isinstance(item, dict):
                self.cut |= bool(item.get("cut"))
                self.moment = bool(item.get("frozen"))
                continue
            *lines, rest = (rest + item).split(b"\n")
            if len(rest) > MAX_LINE:
                raise violation("an entry without an end")
            for line in lines:
                yield parse_line(line)

    # Windows

    async def _window(self, window: list[tuple[Entry, Entry | None]], writer: PageWriter) -> None:
        entries: list[Entry | None] = []
        wanted: list[int] = []
        for entry, known in window:
            if entry.kind != FILE:
                entries.append(entry)
            elif (
                known is not None and entry.is_unchanged_since(known) and self._can_refer_to(known)
            ):
                entries.append(replace(entry, parts=known.parts))
            else:
                wanted.append(len(entries))
                entries.append(entry)
        packed = await self._collected(entries, wanted)
        await self._end_pack()
        for index, (pack, start) in packed.items():
            found = entries[index]
            assert found is not None
            parts = tuple(place_parts(found.parts, pack.name, start))
            entries[index] = replace(found, parts=parts)
        for each in entries:
            if each is not None:
                self._count(each)
                await self._page(writer.add(each))

    def _can_refer_to(self, known: Entry) -> bool:
        return not any(part.object in self._sparse for part in known.parts)

    def _count(self, entry: Entry) -> None:
        self.entries += 1
        if entry.kind == FILE:
            self.files += 1
            self.size += entry.size
        for part in entry.parts:
            if part.object is not None:
                self._used[part.object] = self._used.get(part.object, 0) + part.length

    async def _page(self, page: tuple[str, bytes] | None) -> None:
        if page is not None:
            first, data = page
            name = digest(data)
            self._pages.append((first, name))
            await self._write(name, data)

    # Contents

    async def _collected(
        self, entries: list[Entry | None], wanted: list[int]
    ) -> dict[int, tuple[_Pack, int]]:
        """
        Read these entries and set their parts; entries of removed files become null. Returns the
        pack of each small file and its offset there, because packs have no name yet.
        """
        packed: dict[int, tuple[_Pack, int]] = {}
        for left in range(MAX_READS - 1, -1, -1):
            again: list[int] = []
            async for index, entry, small, same in self._contents(entries, wanted):
                if entry is not None and not same and left:
                    again.append(index)
                    continue
                self.settled &= same or entry is None
                entries[index] = entry
                if small:
                    packed[index] = await self._packed(small)
            if not again:
                break
            wanted = again
        return packed

    async def _contents(
        self, entries: list[Entry | None], wanted: list[int]
    ) -> AsyncIterator[tuple[int, Entry | None, bytes, bool]]:
        """
        Of each file: its index, its entry with its parts, its data if it is small, and whether it
        did not change while it was read. Parts of small files have no object yet.
        """
        if not wanted:
            return
        paths = [entry.path for index in wanted if (entry := entries[index]) is not None]
        reading: IncomingFile | None = None
        async for item in self._link.pull("collect", paths=paths):
            if isinstance(item, bytes):
                if reading is None:
                    raise violation("data outside of a file")
                await self._read(reading, item)
                continue
            event = item.get("event")
            if event is None:
                continue  # The answer, after the last file.
            if event == "hole":
                if reading is None:
                    raise violation("a hole outside of a file")
                await self._hole(reading, number_of(item, "length", 2**63))
                continue
            index = wanted[number_of(item, "index", len(wanted))]
            if event == "gone":
                yield index, None, b"", True
            elif event == "file":
                reading = IncomingFile(parse_entry(item.get("entry")))
                asked = entries[index]
                if asked is None or reading.entry.path != asked.path or reading.entry.kind != FILE:
                    raise violation(f"{reading.entry.path!r}, which was not requested")
            elif event == "over" and reading is not None:
                done, reading = reading, None
                found, small = await self._finish(done)
                yield index, found, small, bool(item.get("same"))

    async def _finish(self, reading: IncomingFile) -> tuple[Entry | None, bytes]:
        """The entry with its parts, and the data of a small file."""
        if reading.too_many_parts:
            self.cut = True
            return None, b""
        small = b""
        if reading.stored or len(reading.data) > SMALL:
            await self._cut(reading)
        else:
            small = bytes(reading.data)
            reading.parts += reading.pending
        # The size that was read: the file may have changed meanwhile.
        size = reading.position if reading.position < reading.entry.size else reading.entry.size
        return replace(reading.entry, size=size, parts=tuple(reading.parts)), small

    async def _read(self, reading: IncomingFile, data: bytes) -> None:
        if reading.position + len(data) > reading.entry.size:
            raise violation(f"more of {reading.entry.path!r} than its size")
        view = memoryview(data)
        while view:
            room = min(MAX_OBJECT - reading.position % MAX_OBJECT, MAX_OBJECT - len(reading.data))
            piece = view[:room]
            reading.add(piece)
            view = view[len(piece) :]
            if len(reading.data) == MAX_OBJECT or reading.position % MAX_OBJECT == 0:
                await self._cut(reading, least=SMALL)

    async def _hole(self, reading: IncomingFile, length: int) -> None:
        if reading.position + length > reading.entry.size:
            raise violation(f"more of {reading.entry.path!r} than its size")
        if reading.entry.size <= SMALL:
            reading.add(bytes(length))
            return
        crosses = reading.position // MAX_OBJECT != (reading.position + length) // MAX_OBJECT
        reading.skip(length)
        if crosses:
            await self._cut(reading, least=SMALL)

    async def _cut(self, reading: IncomingFile, least: int = 1) -> None:
        """
        Store the pending data of a large file in one object. Holes do not end an object, so objects
        are large however many pieces of data there are.
        """
        if len(reading.data) < least:
            return
        if reading.too_many_parts:
            reading.data.clear()
            return
        data = bytes(reading.data)
        reading.data.clear()
        reading.stored = True
        reading.parts += place_parts(reading.pending, await self._store(data), 0)
        reading.pending.clear()

    async def _packed(self, data: bytes) -> tuple[_Pack, int]:
        """Pack of the data, and the offset there."""
        name = digest(data)
        if name in self._same:
            self._same.move_to_end(name)
            return self._same[name]
        if len(self._pack.data) + len(data) > MAX_OBJECT:
            await self._end_pack()
        pack, offset = self._pack, len(self._pack.data)
        pack.data += data
        self._same[name] = (pack, offset)
        if len(self._same) > DEDUPLICATED:
            self._same.popitem(last=False)
        return pack, offset

    async def _end_pack(self) -> None:
        pack, self._pack = self._pack, _Pack()
        if pack.data:
            data = bytes(pack.data)
            pack.data.clear()
            pack.name = await self._store(data)

    async def _store(self, data: bytes) -> str:
        """Store an object; returns its name."""
        name = await asyncio.to_thread(digest, data)
        self._sizes[name] = len(data)
        await self._write(name, data)
        return name

    async def _write(self, name: str, data: bytes) -> None:
        self._writes.add(asyncio.ensure_future(self._objects.put(name, data)))
        self.stored += len(data)
        await self._wait_for_writes(AT_ONCE)

    async def _wait_for_writes(self, most: int) -> None:
        """Wait until at most `most` writes are in progress; raises what they raise."""
        while len(self._writes) > most:
            done, self._writes = await asyncio.wait(
                self._writes, return_when=asyncio.FIRST_COMPLETED
            )
            # Of all: asyncio warns about an exception that is never retrieved.
            failed = [error for task in done if (error := task.exception()) is not None]
            if failed:
                raise failed[0]


def _mostly_unused(before: Manifest | None) -> frozenset[str]:
    if before is None:
        return frozenset()
    return frozenset(name for name, (used, size) in before.objects.items() if used * 2 < size)
