"""Webhooks: URLs that events are sent to, and the progress of delivery."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

MAX_URL_LENGTH = 2048
MAX_WEBHOOKS = 100


@dataclass(frozen=True, slots=True)
class Deliveries:
    """The state of delivery."""

    failures: int = 0
    """Failed attempts to deliver the next event."""
    gave_up: int = 0
    """Events that were skipped after too many failed attempts."""
    missed: int = 0
    """Events, of any type, that expired before they were delivered."""
    last_status: int | None = None
    """HTTP status of the last response; null if there was none."""
    last_error: str | None = None
    """Why the last attempt failed; null if it succeeded."""
    last_at: datetime | None = None
    """The time of the last attempt."""
    retry_at: datetime | None = None
    """When delivery is retried."""


@dataclass(frozen=True, slots=True)
class Webhook:
    id: str
    created_at: datetime
    url: str
    secret: str = field(repr=False)
    """Encrypted."""
    types: tuple[str, ...]
    """Types of events to deliver, or patterns; all if empty."""
    delivered: int
    """The number of the last event that was delivered or did not match."""
    enabled: bool = True
    deliveries: Deliveries = Deliveries()
    version: int = 1
