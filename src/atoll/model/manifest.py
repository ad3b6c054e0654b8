"""
What a checkpoint is made of.

A manifest names pages; a page lists entries, in the order of their paths; an entry of a file says
where its bytes are: in which objects, from where, how many. Objects, pages among them, are named by
the SHA-256 of their content, so the same content is stored once and what comes back is checked.

Pages end where the path of an entry says so, not by their number of entries: a file that is added
changes its own page and no other.
"""

from __future__ import annotations

import bisect
import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll.model.file_times import MAX_NANOSECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

VERSION = 1
MAX_OBJECT = 8 * 2**20
"""Bytes of an object; a file that is larger has several."""
PAGE_ENTRIES = 4096
"""A page has no more than these."""
PAGE_BYTES = 2**20
"""Nor more than so much text, but for its last entry."""
MAX_PAGE = 8 * 2**20
"""More text than any page has: the last entry may be a file of `MOST_PARTS` parts."""
MAX_MANIFEST = 64 * 2**20
"""Bytes; a workspace that needs more is not saved."""
MAX_PARTS = 40_000
"""Of one file: that is 312 GiB without a hole."""
MAX_PATH = 16 * 1024
"""Characters; what lies deeper is left out."""
MAX_DEPTH = 256
"""Names in a path; an executor does not go as deep."""
MAX_NAME = 255
"""Bytes of each name in a path; no file system takes more."""
MAX_FILE_SIZE = 2**63 - 1
FILE, DIRECTORY, SYMLINK = "f", "d", "l"


class Part(NamedTuple):
    """Bytes of a file: a piece of an object, or a hole where `object` is none."""

    object: str | None
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Entry:
    path: str
    kind: str
    mode: int
    size: int
    modified: int
    """Nanoseconds since 1970, as the others."""
    changed: int
    """Inode and change time are the node's: the same again means that nothing changed."""
    inode: int
    target: str = ""
    """Of a symbolic link."""
    parts: tuple[Part, ...] = ()

    @property
    def order(self) -> list[str]:
        return self.path.split("/")

    def is_as(self, other: Entry) -> bool:
        """Whether nothing was done to it since the other was written down."""
        return (
            self.kind == other.kind
            and self.inode == other.inode
            and self.changed == other.changed
            and self.modified == other.modified
            and self.size == other.size
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    session_id: str
    number: int
    created_at: str
    files: int
    size: int
    pages: tuple[tuple[str, str], ...]
    """First path and object of each, in order."""
    objects: dict[str, tuple[int, int]]
    """Every object but the pages: how much of it is in use, and its size."""
    cut: bool = False
    """Whether there was more than a checkpoint can hold."""
    settled: bool = True
    """Whether nothing changed while it was taken."""
    moment: bool = False
    """Whether the list of files is of one moment: user code stood still while it was made."""

    @property
    def names(self) -> set[str]:
        """All objects that it needs."""
        return self.objects.keys() | {name for _, name in self.pages}

    def page_of(self, path: str) -> str | None:
        """The page that has the path, if any has."""
        index = self._place(path)
        return self.pages[index][1] if index >= 0 else None

    def pages_from(self, path: str) -> list[str]:
        """The page that has the path, or would have it, and all after it."""
        return [page for _, page in self.pages[max(0, self._place(path)) :]]

    def _place(self, path: str) -> int:
        order = [first.split("/") for first, _ in self.pages]
        return bisect.bisect_right(order, path.split("/")) - 1

    def encoded(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"version": VERSION, **fields}, separators=(",", ":")).encode()


def parse_entry(fields: Sequence[Any]) -> Entry:
    """
    An entry as an executor tells it: without parts. Raises `ValueError` or `TypeError` for what no
    file system can have.
    """
    path, kind, mode, size, modified, changed, inode, *rest = fields
    target = rest[0] if rest else ""
    if not isinstance(path, str) or not isinstance(target, str):
        raise TypeError("a path is text")
    if len(path) > MAX_PATH or len(target) > MAX_PATH or "\0" in path or "\0" in target:
        raise ValueError("not a path")
    parts = path.split("/")
    if len(parts) > MAX_DEPTH:
        raise ValueError("a path is too deep")
    for part in parts:
        if part in ("", ".", ".."):
            raise ValueError("not a path beneath the workspace")
        if len(part.encode("utf-8", "surrogateescape")) > MAX_NAME:
            raise ValueError("a name is too long")
    if kind not in (FILE, DIRECTORY, SYMLINK):
        raise ValueError("not a kind")
    numbers = (mode, size, modified, changed, inode)
    if not all(type(number) is int for number in numbers):
        raise TypeError("not a number")
    if not 0 <= size <= MAX_FILE_SIZE or not 0 <= mode <= 0o7777:
        raise ValueError("not a size or a mode")
    if max(abs(modified), abs(changed)) > MAX_NANOSECONDS or not 0 <= inode < 2**64:
        raise ValueError("not a time or an inode")
    return Entry(path, kind, mode, size, modified, changed, inode, target)


class PageWriter:
    """Entries in, pages out."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._size = 0
        self._first = ""

    def add(self, entry: Entry) -> tuple[str, bytes] | None:
        """The page that the entry ends, if it ends one: its first path and its content."""
        if not self._lines:
            self._first = entry.path
        line = _line(entry)
        self._lines.append(line)
        self._size += len(line)
        ends = zlib.crc32(entry.path.encode("utf-8", "surrogatepass")) % 1024 == 0
        if ends or len(self._lines) >= PAGE_ENTRIES or self._size >= PAGE_BYTES:
            return self.end()
        return None

    def end(self) -> tuple[str, bytes] | None:
        if not self._lines:
            return None
        page = zlib.compress(b"\n".join(self._lines), 3)
        self._lines, self._size = [], 0
        return self._first, page


def _line(entry: Entry) -> bytes:
    fields: list[Any] = [
        entry.path, entry.kind, entry.mode, entry.size, entry.modified, entry.changed,
        entry.inode, entry.target, entry.parts,
    ]  # fmt: skip
    return json.dumps(fields, separators=(",", ":")).encode()


def spans(parts: Sequence[Part], start: int, end: int) -> Iterator[Part]:
    """The parts, or what of them lies between two places in the file."""
    place = 0
    for part in parts:
        first, last = max(start, place), min(end, place + part.length)
        if first < last:
            yield Part(part.object, part.offset + first - place, last - first)
        place += part.length
        if place >= end:
            return
