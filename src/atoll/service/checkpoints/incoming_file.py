"""A file whose content the executor sends for a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.model.manifest import MAX_PARTS, Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from atoll.model.manifest import Entry


class IncomingFile:
    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.data = bytearray()
        """Received, but not stored in an object yet."""
        self.pending: list[Part] = []
        """Parts of `data`, whose object has no name yet, and the holes between them."""
        self.parts: list[Part] = []
        self.count = 0
        """Number of all parts so far; the parts are dropped once there are too many."""
        self.position = 0
        self.stored = False
        """Whether a part of the file has an object of its own."""

    @property
    def too_many_parts(self) -> bool:
        return self.count > MAX_PARTS

    def add(self, data: bytes | memoryview) -> None:
        last = self.pending[-1] if self.pending else None
        start, length = len(self.data), len(data)
        self.data += data
        if last is not None and last.object is not None:
            self.pending[-1] = Part("", last.offset, last.length + length)
            self.position += length
        else:
            self._append(Part("", start, length))

    def skip(self, length: int) -> None:
        """Add a hole."""
        self._append(Part(None, 0, length))

    def _append(self, part: Part) -> None:
        self.position += part.length
        self.count += 1
        if self.too_many_parts:
            self.parts.clear()
            self.pending.clear()
        else:
            self.pending.append(part)


def place_parts(parts: Iterable[Part], name: str, start: int) -> Iterator[Part]:
    """The parts, where those without an object are in the object `name` from `start` on."""
    for part in parts:
        if part.object is None or part.object:
            yield part
        else:
            yield Part(name, start + part.offset, part.length)
