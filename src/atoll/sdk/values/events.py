"""Events of the server."""

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
