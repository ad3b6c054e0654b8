"""One change, as it is told to those who follow what happens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import datetime


@dataclass(frozen=True, slots=True)
class Event:
    type: str
    """The noun and what it came to be: `session.stopped`."""
    subject: str
    """The id of what changed."""
    at: datetime
    data: dict[str, Any] = field(default_factory=dict)
    """Small, and for everybody who may read: no code, no values of variables."""
    number: int | None = None
    """Its place on the feed, once it has one: one more than that of the event before."""
