"""Files that several sessions share."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

LOCAL, S3 = "local", "s3"


@dataclass(frozen=True, slots=True)
class Volume:
    id: str
    """Its name, chosen by its creator."""
    created_at: datetime
    size: int
    """Capacity in bytes; 0 for unlimited, in the blob store."""
    kind: str
    """`local`: on the disk of one node. `s3`: a prefix of the bucket, mounted by each node."""
    node_id: str | None = None
    """The node that has it; null if all nodes do."""
    version: int = 1


@dataclass(frozen=True, slots=True)
class VolumeMount:
    """Where a session mounts a volume."""

    volume_id: str
    path: str
    """Absolute path inside the session."""
    read_only: bool = True
