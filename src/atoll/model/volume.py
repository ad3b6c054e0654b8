"""Files that several sessions share."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

LOCAL, S3 = "local", "s3"


@dataclass(frozen=True, slots=True)
class Volume:
    id: str
    """Its name, chosen by who made it."""
    created_at: datetime
    size: int
    """Bytes that it may hold; 0 where the blob store holds it and sets no bound."""
    kind: str
    """`local`: on the disk of one node. `s3`: a prefix of the bucket, mounted by each node."""
    node_id: str | None = None
    """The node that has it; none for one that all have."""
    version: int = 1


@dataclass(frozen=True, slots=True)
class VolumeMount:
    """A volume as a session sees it."""

    volume_id: str
    path: str
    """Absolute, inside."""
    read_only: bool = True
