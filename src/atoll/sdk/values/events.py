"""Events of the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - `decode` reads the annotations
from typing import Any


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """A change of a session, execution, node or template, as the feed tells it."""

    type: str
    """Like `session.stopped`."""
    subject: str
    """The id of what changed."""
    at: datetime
    data: dict[str, Any] = field(default_factory=dict)
    number: int | None = None
    """Its place on the feed; none for one that is on none, as a webhook's test."""
