"""Volumes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime  # noqa: TC003 - `decode` reads the annotations


@dataclass(frozen=True, slots=True)
class VolumeInfo:
    """A volume as the server describes it."""

    id: str
    kind: str
    """local or s3."""
    size: str | None
    """None where the bucket sets the bound."""
    node_id: str | None
    """The node that has it; none for one that all have."""
    created_at: datetime
