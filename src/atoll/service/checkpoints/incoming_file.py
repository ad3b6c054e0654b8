"""
What an executor tells of files, for a checkpoint: checked, because it may tell anything.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from atoll.link.errors import ProtocolViolation
from atoll.model.manifest import MAX_PARTS, Part, parse_entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from atoll.model.manifest import Entry


class IncomingFile:
    """A file whose content comes in."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.data = bytearray()
        self.waiting: list[Part] = []
        """What is in `data`, which has no name yet, and the holes between."""
        self.parts: list[Part] = []
        self.pieces = 0
        """All parts so far; they are not kept when they are too many."""
        self.place = 0
        self.stored = False

    @property
    def too_many(self) -> bool:
        return self.pieces > MAX_PARTS

    def add(self, data: bytes | memoryview) -> None:
        last = self.waiting[-1] if self.waiting else None
        start, length = len(self.data), len(data)
        self.data += data
        if last is not None and last.object is not None:
            self.waiting[-1] = Part("", last.offset, last.length + length)
            self.place += length
        else:
            self._append(Part("", start, length))

    def skip(self, length: int) -> None:
        self._append(Part(None, 0, length))

    def _append(self, part: Part) -> None:
        self.place += part.length
        self.pieces += 1
        if self.too_many:
            self.parts.clear()
            self.waiting.clear()
        else:
            self.waiting.append(part)


def placed(parts: Iterable[Part], name: str, start: int) -> Iterator[Part]:
    """The parts, with the object that those which are no holes are in from `start` on."""
    for part in parts:
        if part.object is None or part.object:
            yield part
        else:
            yield Part(name, start + part.offset, part.length)


def nonsense(what: str) -> ProtocolViolation:
    return ProtocolViolation(f"The executor sent {what[:200]}.")


def read_line(line: bytes) -> Entry:
    try:
        return checked(json.loads(line))
    except (ValueError, RecursionError):
        raise nonsense("something that is no entry") from None


def checked(fields: object) -> Entry:
    try:
        if isinstance(fields, list):
            return parse_entry(fields)
    except (ValueError, TypeError, OverflowError):
        pass
    raise nonsense("something that is no entry")


def number_of(item: dict[str, Any], name: str, below: int) -> int:
    number = item.get(name)
    if not isinstance(number, int) or not 0 <= number < below:
        raise nonsense(f"{name} {number!r}")
    return number
