"""
A checkpoint being taken: what changed is read through the link and stored, the rest is referred to.

The executor tells all entries in order, the checkpoint before has them in the same order, so the
two are compared side by side, a window at a time: neither is ever whole in memory. Files with
little data share objects; a large one is cut at fixed places, so a change in the middle stores one
piece anew. An object that is mostly out of use is left behind: what of it is in use is read again.

What an executor sends is checked: a `ProtocolViolation` ends its link, and there is no checkpoint.
User code decides how many names, how long names and how many holes there are, so each has a bound;
what lies beyond is left out, and the checkpoint is told as cut.
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
from atoll.service.checkpoints.incoming_file import (
    IncomingFile,
    checked,
    nonsense,
    number_of,
    placed,
    read_line,
)
from atoll.service.checkpoints.scan import listed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.link.client import Link
    from atoll.service.checkpoints.chunks import ChunkStore

WINDOW = 2000
"""Entries that are looked at together."""
WINDOW_TEXT = 4 * 2**20
"""Characters of their paths, which travel in one request."""
WINDOW_SIZE = 512 * 2**20
"""Bytes of their files, each 8 KiB of which may be a piece of data and a hole."""
MOST_ENTRIES = 5_000_000
"""Code that makes directories while they are walked would make a walk without end."""
MAX_LINE = 2**20
"""Bytes by which an executor tells of one entry."""
SMALL = 128 * 1024
"""Bytes of data of a file that still shares an object with others."""
TRIES = 3
"""For a file that changes while it is read."""
SAME = 10_000
"""Small files whose content is remembered, so that its like is stored once."""


@dataclass(slots=True)
class _Pack:
    """An object of small files in the making; it has no name before it is whole."""

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
        """Bytes that were written."""
        self.changed = before is None
        """Whether it differs from the one before."""
        self.settled = True
        self.cut = False
        self.moment = False
        """Whether user code stood still while the list of files was made."""

    async def run(self) -> None:
        if self._before is not None:
            self._objects.know(self._before.objects)
            self._objects.know(name for _, name in self._before.pages)
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
            await self._written(0)
        except ProtocolViolation as violation:
            self._link.violated(violation)
            raise
        finally:
            for task in self._writes:
                task.cancel()
            await asyncio.gather(*self._writes, return_exceptions=True)
        if self._before is not None and tuple(self._pages) != self._before.pages:
            self.changed = True

    @property
    def stray(self) -> set[str]:
        """Unused objects that were there, or were written for a try that came to nothing."""
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

    # What is there, beside what was

    async def _compared(self) -> AsyncIterator[tuple[Entry, Entry | None]]:
        old = self._old()
        known = await anext(old, None)
        last: list[str] = []
        seen = 0
        async for entry in self._scanned():
            seen += 1
            if seen > MOST_ENTRIES:
                self.cut = True
                return
            order = entry.order
            if order <= last:
                raise nonsense(f"{entry.path!r} comes behind {'/'.join(last)!r}")
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
        async for item in listed(self._link):
            if isinstance(item, dict):
                self.cut |= bool(item.get("cut"))
                self.moment = bool(item.get("frozen"))
                continue
            *lines, rest = (rest + item).split(b"\n")
            if len(rest) > MAX_LINE:
                raise nonsense("an entry that does not end")
            for line in lines:
                yield read_line(line)

    # A window

    async def _window(self, window: list[tuple[Entry, Entry | None]], writer: PageWriter) -> None:
        entries: list[Entry | None] = []
        wanted: list[int] = []
        for entry, known in window:
            if entry.kind != FILE:
                entries.append(entry)
            elif known is not None and entry.is_as(known) and self._stays(known):
                entries.append(replace(entry, parts=known.parts))
            else:
                wanted.append(len(entries))
                entries.append(entry)
        packed = await self._collected(entries, wanted)
        await self._end_pack()
        for index, (pack, start) in packed.items():
            found = entries[index]
            assert found is not None
            parts = tuple(placed(found.parts, pack.name, start))
            entries[index] = replace(found, parts=parts)
        for each in entries:
            if each is not None:
                self._count(each)
                await self._page(writer.add(each))

    def _stays(self, known: Entry) -> bool:
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
        Fill in the parts of these entries; those that are gone become none. Those with little data
        are in an object that has no name yet: from where on.
        """
        packed: dict[int, tuple[_Pack, int]] = {}
        for left in range(TRIES - 1, -1, -1):
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
        Of each: its entry with its parts, its data if that is little, whether it kept still. The
        parts of little data have no object yet.
        """
        if not wanted:
            return
        paths = [entry.path for index in wanted if (entry := entries[index]) is not None]
        reading: IncomingFile | None = None
        async for item in self._link.pull("collect", paths=paths):
            if isinstance(item, bytes):
                if reading is None:
                    raise nonsense("data of no file")
                await self._read(reading, item)
                continue
            event = item.get("event")
            if event is None:
                continue  # Its answer: that was all.
            if event == "hole":
                if reading is None:
                    raise nonsense("a hole in no file")
                await self._hole(reading, number_of(item, "length", 2**63))
                continue
            index = wanted[number_of(item, "index", len(wanted))]
            if event == "gone":
                yield index, None, b"", True
            elif event == "file":
                reading = IncomingFile(checked(item.get("entry")))
                asked = entries[index]
                if asked is None or reading.entry.path != asked.path or reading.entry.kind != FILE:
                    raise nonsense(f"{reading.entry.path!r}, which was not asked for")
            elif event == "over" and reading is not None:
                done, reading = reading, None
                found, small = await self._whole(done)
                yield index, found, small, bool(item.get("same"))

    async def _whole(self, reading: IncomingFile) -> tuple[Entry | None, bytes]:
        """The file with its parts, and its data if that is little."""
        if reading.too_many:
            self.cut = True
            return None, b""
        small = b""
        if reading.stored or len(reading.data) > SMALL:
            await self._cut(reading)
        else:
            small = bytes(reading.data)
            reading.parts += reading.waiting
        # What it was read as: it may have changed meanwhile.
        size = reading.place if reading.place < reading.entry.size else reading.entry.size
        return replace(reading.entry, size=size, parts=tuple(reading.parts)), small

    async def _read(self, reading: IncomingFile, data: bytes) -> None:
        if reading.place + len(data) > reading.entry.size:
            raise nonsense(f"more of {reading.entry.path!r} than it has")
        view = memoryview(data)
        while view:
            room = min(MAX_OBJECT - reading.place % MAX_OBJECT, MAX_OBJECT - len(reading.data))
            piece = view[:room]
            reading.add(piece)
            view = view[len(piece) :]
            if len(reading.data) == MAX_OBJECT or reading.place % MAX_OBJECT == 0:
                await self._cut(reading, least=SMALL)

    async def _hole(self, reading: IncomingFile, length: int) -> None:
        if reading.place + length > reading.entry.size:
            raise nonsense(f"more of {reading.entry.path!r} than it has")
        if reading.entry.size <= SMALL:
            reading.add(bytes(length))
            return
        crosses = reading.place // MAX_OBJECT != (reading.place + length) // MAX_OBJECT
        reading.skip(length)
        if crosses:
            await self._cut(reading, least=SMALL)

    async def _cut(self, reading: IncomingFile, least: int = 1) -> None:
        """
        Store what was gathered of a large file, holes left out: so many pieces of data as there may
        be, objects are not small.
        """
        if len(reading.data) < least:
            return
        if reading.too_many:
            reading.data.clear()
            return
        data = bytes(reading.data)
        reading.data.clear()
        reading.stored = True
        reading.parts += placed(reading.waiting, await self._named(data), 0)
        reading.waiting.clear()

    async def _packed(self, data: bytes) -> tuple[_Pack, int]:
        """Where in which pack the data is."""
        name = digest(data)
        if name in self._same:
            self._same.move_to_end(name)
            return self._same[name]
        if len(self._pack.data) + len(data) > MAX_OBJECT:
            await self._end_pack()
        pack, offset = self._pack, len(self._pack.data)
        pack.data += data
        self._same[name] = (pack, offset)
        if len(self._same) > SAME:
            self._same.popitem(last=False)
        return pack, offset

    async def _end_pack(self) -> None:
        pack, self._pack = self._pack, _Pack()
        if pack.data:
            data = bytes(pack.data)
            pack.data.clear()
            pack.name = await self._named(data)

    async def _named(self, data: bytes) -> str:
        """Store an object."""
        name = await asyncio.to_thread(digest, data)
        self._sizes[name] = len(data)
        await self._write(name, data)
        return name

    async def _write(self, name: str, data: bytes) -> None:
        self._writes.add(asyncio.ensure_future(self._objects.put(name, data)))
        self.stored += len(data)
        await self._written(AT_ONCE)

    async def _written(self, most: int) -> None:
        """Until no more than so many writes are under way; what they raise is raised here."""
        while len(self._writes) > most:
            done, self._writes = await asyncio.wait(
                self._writes, return_when=asyncio.FIRST_COMPLETED
            )
            # Of each: one that nobody asks for its error complains.
            failed = [error for task in done if (error := task.exception()) is not None]
            if failed:
                raise failed[0]


def _mostly_unused(before: Manifest | None) -> frozenset[str]:
    if before is None:
        return frozenset()
    return frozenset(name for name, (used, size) in before.objects.items() if used * 2 < size)
