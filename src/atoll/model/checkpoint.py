"""Stored copies of a session's workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """One checkpoint in the blob store."""

    number: int
    manifest: str
    created_at: datetime
    files: int
    size: int
    node_id: str
    settled: bool
    """Whether no file changed while it was taken."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The newest checkpoint of a session, and older ones in case it is damaged."""

    id: str
    """The id of the session."""
    number: int
    manifest: str
    """The key of the object that lists its files."""
    created_at: datetime
    files: int
    size: int
    """Bytes of all files together."""
    node_id: str
    """The node that wrote it and may still be uploading parts of it."""
    kept_until: datetime | None = None
    """When it will be removed; null while its session exists."""
    version: int = 1
    settled: bool = True
    """Whether no file changed while it was taken."""
    older: tuple[CheckpointRef, ...] = ()
    """Newest first."""
    damaged: bool = False
    """Whether parts are missing or damaged, so that the next checkpoint must not reuse any."""

    @property
    def backups(self) -> list[CheckpointRef]:
        """All checkpoints, newest first."""
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
    The older checkpoints to retain beside a new one: the last, because it may be being read, and as
    many settled ones as are needed for `backups` in all. `settled` says whether the new one is.
    """
    missing = backups - settled
    kept: list[CheckpointRef] = []
    for candidate in candidates:
        if not kept or (candidate.settled and missing > 0):
            kept.append(candidate)
            missing -= candidate.settled
    return tuple(kept)
