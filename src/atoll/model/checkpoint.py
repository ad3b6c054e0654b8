"""A session's workspace as it was at one moment, kept in the blob store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The newest one of a session; there is one a session, and each replaces the one before."""

    id: str
    """The session's."""
    number: int
    manifest: str
    """The key of the object that lists its files."""
    created_at: datetime
    files: int
    size: int
    """Bytes of all files together."""
    node_id: str
    """The node that wrote it, which may have parts of it that the blob store has yet to get."""
    kept_until: datetime | None = None
    """When it is to be removed; none while its session lives."""
    version: int = 1
