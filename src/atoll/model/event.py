"""One change, as it is told to those who follow what happens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from atoll.model import plan

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.model.session import Session


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


def session_event(session: Session, at: datetime, what: str | None = None) -> Event:
    """That a session has come to be what it is; `what` instead of its status if that is told."""
    data = {
        "status": session.status,
        "wanted": session.wanted,
        "observed": plan.observed(session),
        "cause": session.cause,
        "template_id": session.template_id,
        "node_id": session.runtime_node,
    }
    return Event(f"session.{what or session.status}", session.id, at, data)
