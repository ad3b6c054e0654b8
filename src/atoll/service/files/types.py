"""What the file operations of a session take and return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import datetime


@dataclass(frozen=True, slots=True)
class FileInfo:
    path: str
    type: str
    size: int
    mode: int
    modified_at: datetime
    etag: str | None = None
    """Changes whenever the content may have changed."""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `first` to `last` of a file, or its last `last` bytes if `first` is null."""

    first: int | None
    last: int | None
    if_range: str | None = None
    """Read the complete file if its etag differs from this one."""


@dataclass(frozen=True, slots=True)
class Download:
    entry: FileInfo
    start: int | None
    """Null if the file has none of the requested bytes."""
    stop: int
    content: AsyncIterator[bytes]


@dataclass(frozen=True, slots=True)
class Search:
    query: str
    regex: bool = False
    ignore_case: bool = False
    glob: str | None = None
    """Search only files that match this pattern."""


@dataclass(frozen=True, slots=True)
class SearchMatch:
    path: str
    line: int
    column: int
    text: str
