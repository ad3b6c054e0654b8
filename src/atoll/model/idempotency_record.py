"""Requests with an idempotency key, and their responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class IdempotencyRecord:
    id: str
    """A digest of the client and of the key that it chose."""
    holder: str
    """The replica that handles it."""
    created_at: datetime
    expires_at: datetime
    fingerprint: str | None = None
    """A digest of method, path and body; known once the body was received."""
    status: int | None = None
    """None until it was answered."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    kept: str | None = None
    """The blob key of a body that is too large for a row; ends with the body's digest."""
