"""Webhooks."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - `decode` reads the annotations


@dataclass(frozen=True, slots=True)
class Deliveries:
    """How it went with a webhook so far."""

    failures: int = 0
    """Tries at the next event, all of which failed."""
    gave_up: int = 0
    """Events given up after too many tries."""
    missed: int = 0
    """Events that were no longer kept when it was their turn."""
    last_status: int | None = None
    last_error: str | None = None
    last_at: datetime | None = None
    retry_at: datetime | None = None
    """When the next event is tried again."""


@dataclass(frozen=True, slots=True)
class WebhookInfo:
    """An address that is told of events."""

    id: str
    url: str
    types: tuple[str, ...]
    """Of the events that it is told of; all when there are none."""
    enabled: bool
    created_at: datetime
    delivered: int
    """The number of the last event that it was told of."""
    deliveries: Deliveries
    secret: str | None = field(default=None, repr=False)
    """What deliveries are signed with, in the answer that made it and never again."""


@dataclass(frozen=True, slots=True)
class WebhookTest:
    """What came of sending an event to a webhook."""

    delivered: bool
    status: int | None = None
    error: str | None = None
