"""Volumes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime  # noqa: TC003 - `decode` reads the annotations


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """A volume as the server returned it."""

    id: str
    kind: str
    """local or s3."""
    size: str | None
    """None for s3: the bucket is the limit."""
    node_id: str | None
    """The node that stores the volume; None if all nodes can reach it."""
    created_at: datetime
