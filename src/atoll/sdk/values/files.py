"""Files of a session."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime  # noqa: TC003 - `decode` reads the annotations
from typing import Literal


@dataclass(frozen=True, slots=True)
class Entry:
    """
    A file or directory; `path` is relative to the workspace. Bytes of a name that are not UTF-8 are
    as `os.fsdecode` writes them.
    """

    path: str
    name: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: str
    modified_at: datetime
    etag: str | None = None
    """Another one whenever the file is changed; of a file only."""


@dataclass(frozen=True, slots=True)
class Match:
    """A line that holds what was searched for; `line` and `column` begin with 1."""

    path: str
    line: int
    column: int
    text: str
    """The line, or 400 characters of it around the match."""


@dataclass(frozen=True, slots=True)
class FileEvent:
    """What happened to a file."""

    kind: Literal["watching", "created", "modified", "deleted", "moved", "overflow"]
    """`watching` comes first; `overflow` says that some were missed: look for yourself."""
    path: str = ""
    moved_from: str | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """A URL by which whoever has it can read or write one file."""

    url: str
    method: str
    expires_at: datetime
    native: bool = False
    """Whether it leads straight to the blob store."""
    complete_url: str | None = None
    """To POST to, without a body, after a PUT to a native one."""


@dataclass(frozen=True, slots=True)
class Tree:
    """What was copied of a directory."""

    path: str
    """Where it is now."""
    files: int
    size: int
    """Bytes of these files together."""
    left_out: tuple[str, ...] = ()
    """What could not be copied, with the reason; the first 1000 of it."""
