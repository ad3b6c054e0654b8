"""Events of the server, and webhooks that receive them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - `decode` reads the annotations
from typing import Any


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """An event of the server: a change of a session, execution, node or template."""

    type: str
    """Like `session.stopped`."""
    subject: str
    """Id of the changed object."""
    at: datetime
    data: dict[str, Any] = field(default_factory=dict)
    number: int | None = None
    """Position in the event feed. None for the test event of a webhook."""


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Delivery statistics of a webhook."""

    failures: int = 0
    """Failed attempts to deliver the next event."""
    gave_up: int = 0
    """Events that were dropped after too many attempts."""
    missed: int = 0
    """Events that expired before they could be delivered."""
    last_status: int | None = None
    last_error: str | None = None
    last_at: datetime | None = None
    retry_at: datetime | None = None
    """Time of the next attempt."""


@dataclass(frozen=True, slots=True)
class WebhookInfo:
    """A URL that receives events."""

    id: str
    url: str
    types: tuple[str, ...]
    """Types of events to deliver; empty means all."""
    enabled: bool
    created_at: datetime
    delivered: int
    """Number of the last delivered event."""
    deliveries: Deliveries
    secret: str | None = field(default=None, repr=False)
    """Signing secret. Returned only when the webhook is created."""


@dataclass(frozen=True, slots=True)
class WebhookTest:
    """Outcome of a test delivery."""

    delivered: bool
    status: int | None = None
    error: str | None = None
