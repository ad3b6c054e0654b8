"""An address that is told of events, and how far that is."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

LONGEST_URL = 2048
MOST_WEBHOOKS = 100


@dataclass(frozen=True, slots=True)
class Deliveries:
    """How it went so far."""

    failures: int = 0
    """Tries at the next event, all of which failed."""
    gave_up: int = 0
    """Events that it was not told of, because too many tries failed."""
    missed: int = 0
    """Events that were no longer kept when it was their turn, of any type."""
    last_status: int | None = None
    """Of its last answer; none when there was none."""
    last_error: str | None = None
    """Why the last try failed; none when it did not."""
    last_at: datetime | None = None
    """When it was last tried."""
    retry_at: datetime | None = None
    """When the next event is tried again."""


@dataclass(frozen=True, slots=True)
class Webhook:
    id: str
    created_at: datetime
    url: str
    secret: str = field(repr=False)
    """Encrypted."""
    types: tuple[str, ...]
    """Of the events that it is told of, or patterns of them; all when there are none."""
    delivered: int
    """The number of the last event that it was told of, or that was none of its."""
    enabled: bool = True
    deliveries: Deliveries = Deliveries()
    version: int = 1
