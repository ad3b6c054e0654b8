"""A request with an idempotency key, and the answer that it got."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    id: str
    """A digest of who asks and of the key that they chose."""
    holder: str
    """The replica that works on it."""
    created_at: datetime
    expires_at: datetime
    fingerprint: str | None = None
    """A digest of method, path and body; known when the body was read to its end."""
    status: int | None = None
    """None until it is answered."""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    kept: str | None = None
    """Where a body that is too large for a row is in the blob store; ends with its digest."""
