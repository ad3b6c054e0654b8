"""
The format of checkpoints.

A manifest lists pages, a page lists entries in the order of their paths, and the entry of a file
lists the parts of objects that contain its bytes. Objects, including pages, are named by the
SHA-256 of their content, so that equal content is stored once and can be verified.

Page boundaries follow from the paths of entries, not from their number: adding a file changes only
its own page.
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
"""Maximum number of entries on a page."""
PAGE_BYTES = 2**20
"""Maximum size of a page, without its last entry."""
MAX_PAGE = 8 * 2**20
"""More text than any page has: the last entry may be a file of `MOST_PARTS` parts."""
MAX_MANIFEST = 64 * 2**20
"""Bytes; a workspace that needs more gets no checkpoint."""
MAX_PARTS = 40_000
"""Per file: 312 GiB without holes."""
MAX_PATH = 16 * 1024
"""Characters; longer paths are left out."""
MAX_DEPTH = 256
"""Names in a path; executors do not descend as deep."""
MAX_NAME = 255
"""Bytes of each name in a path; the limit of file systems."""
MAX_FILE_SIZE = 2**63 - 1
FILE, DIRECTORY, SYMLINK = "f", "d", "l"


class Part(NamedTuple):
    """Bytes of a file: a range of an object, or a hole if `object` is None."""

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
    """Nanoseconds since 1970."""
    changed: int
    """Change time on the node: if it and the inode are the same, the file is unchanged."""
    inode: int
    target: str = ""
    """The target of a symbolic link."""
    parts: tuple[Part, ...] = ()

    @property
    def order(self) -> list[str]:
        return self.path.split("/")

    def is_unchanged_since(self, other: Entry) -> bool:
        """Whether the file was not modified since `other` was recorded."""
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
    """First path and object name of each page, in order."""
    objects: dict[str, tuple[int, int]]
    """Bytes in use and size of every object except pages."""
    cut: bool = False
    """Whether files were left out because of limits."""
    settled: bool = True
    """Whether no file changed while it was taken."""
    moment: bool = False
    """Whether user code was frozen while files were listed."""

    @property
    def names(self) -> set[str]:
        """Names of all objects, including pages."""
        return self.objects.keys() | {name for _, name in self.pages}

    def page_of(self, path: str) -> str | None:
        """The page that can contain the path."""
        index = self._place(path)
        return self.pages[index][1] if index >= 0 else None

    def pages_from(self, path: str) -> list[str]:
        """The page that can contain the path, and all following pages."""
        return [page for _, page in self.pages[max(0, self._place(path)) :]]

    def _place(self, path: str) -> int:
        order = [first.split("/") for first, _ in self.pages]
        return bisect.bisect_right(order, path.split("/")) - 1

    def encoded(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"version": VERSION, **fields}, separators=(",", ":")).encode()


def parse_entry(fields: Sequence[Any]) -> Entry:
    """
    An entry, without parts, as reported by an executor. Raises `ValueError` or `TypeError` for what
    no file system can have.
    """
    path, kind, mode, size, modified, changed, inode, *rest = fields
    target = rest[0] if rest else ""
    if not isinstance(path, str) or not isinstance(target, str):
        raise TypeError("a path is not text")
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
    """Divides entries into pages."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._size = 0
        self._first = ""

    def add(self, entry: Entry) -> tuple[str, bytes] | None:
        """Add an entry; returns first path and content of a page that this completes."""
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
    """The parts of a byte range of the file."""
    place = 0
    for part in parts:
        first, last = max(start, place), min(end, place + part.length)
        if first < last:
            yield Part(part.object, part.offset + first - place, last - first)
        place += part.length
        if place >= end:
            return
