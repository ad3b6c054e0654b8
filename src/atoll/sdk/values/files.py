"""Files of a session."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime  # noqa: TC003 - `decode` reads the annotations
from typing import Literal


@dataclass(frozen=True, slots=True)
class Entry:
    """
    A file or directory. `path` is relative to the workspace. Bytes that are not UTF-8 are escaped
    as `os.fsdecode` does.
    """

    path: str
    name: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: str
    modified_at: datetime
    etag: str | None = None
    """Changes with the file's content. None for directories."""


@dataclass(frozen=True, slots=True)
class Match:
    """A matching line. `line` and `column` start at 1."""

    path: str
    line: int
    column: int
    text: str
    """The line, or 400 characters around the match."""


@dataclass(frozen=True, slots=True)
class FileEvent:
    """A change of a file."""

    kind: Literal["watching", "created", "modified", "deleted", "moved", "overflow"]
    """The first event is `watching`. After `overflow` events are missing: list the files again."""
    path: str = ""
    moved_from: str | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """A presigned URL. Everyone who has it can read or write one file."""

    url: str
    method: str
    expires_at: datetime
    native: bool = False
    """Whether it points directly to the blob store."""
    complete_url: str | None = None
    """After a PUT to a native URL, POST to this one without a body."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Summary of a copied file or directory."""

    path: str
    """Path of the copy."""
    files: int
    size: int
    """Total size in bytes."""
    left_out: tuple[str, ...] = ()
    """Entries that were not copied, with the reason; at most 1000."""
