"""A session's workspace as it was at one moment, kept in the blob store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A checkpoint before the newest that is kept, should the newest turn out to be damaged."""

    number: int
    manifest: str
    created_at: datetime
    files: int
    size: int
    node_id: str
    settled: bool
    """Whether nothing changed while it was taken."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The newest one of a session, with what is kept of those before."""

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
    settled: bool = True
    """Whether nothing changed while it was taken."""
    older: tuple[CheckpointRef, ...] = ()
    """Newest first."""
    damaged: bool = False
    """
    Whether something of it was found missing or damaged: the next one refers to nothing of it.
    """

    @property
    def backups(self) -> list[CheckpointRef]:
        """It and the older ones, newest first."""
        own = CheckpointRef(
            self.number,
            self.manifest,
            self.created_at,
            self.files,
            self.size,
            self.node_id,
            self.settled,
        )
        return [own, *self.older]


def retained(
    candidates: Sequence[CheckpointRef], *, settled: bool, backups: int
) -> tuple[CheckpointRef, ...]:
    """
    Which of those before a new checkpoint stay: the last, because somebody may be reading it, and
    as many settled ones as make `backups` with the new one, if that is `settled`.
    """
    missing = backups - settled
    stay: list[CheckpointRef] = []
    for one in candidates:
        if not stay or (one.settled and missing > 0):
            stay.append(one)
            missing -= one.settled
    return tuple(stay)
