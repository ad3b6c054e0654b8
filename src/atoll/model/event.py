"""Events of the feed: one per change of a session, an execution, a template or a node."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from atoll.model import plan

if TYPE_CHECKING:
    from atoll.model.execution import Execution
    from atoll.model.session import Session
    from atoll.model.template import Template

MAX_TYPE_LENGTH = 64
"""Characters of a type or pattern that is subscribed to."""
MAX_TYPES = 32


@dataclass(frozen=True, slots=True)
class Event:
    type: str
    """Noun and change: `session.stopped`."""
    subject: str
    """The id of what changed."""
    at: datetime
    data: dict[str, Any] = field(default_factory=dict)
    """Small and not secret: no code and no values of variables."""
    number: int | None = None
    """Its position on the feed: consecutive, and assigned soon after the event was stored."""


@dataclass(frozen=True, slots=True)
class FeedRange:
    """The events that the feed has."""

    first: int
    """The number of the oldest event, or of the next one if there is none."""
    last: int
    """The highest number assigned; `first` - 1 if there are no events."""


@dataclass(frozen=True, slots=True)
class FeedPage:
    """The result of searching a part of the feed."""

    events: tuple[Event, ...]
    through: int
    """The number up to which the feed was searched."""
    first: int
    """The number of the feed's oldest event; those before it have expired unseen."""


def session_event(session: Session, at: datetime, what: str | None = None) -> Event:
    """The event that reports a session's status, or `what` if that is given."""
    data = {
        "status": session.status,
        "wanted": session.wanted,
        "observed": plan.observed(session),
        "cause": session.cause,
        "template_id": session.template_id,
        "node_id": session.runtime_node,
    }
    return Event(f"session.{what or session.status}", session.id, at, data)


def execution_event(execution: Execution, what: str, at: datetime) -> Event:
    """`what` is submitted, running, retried, or the final status."""
    outcome = execution.outcome
    cause = None if outcome is None else outcome.cause
    if outcome is None and execution.attempts:
        cause = execution.attempts[-1].cause
    return Event(
        f"execution.{what}",
        execution.id,
        at,
        {
            "session_id": execution.session_id,
            "invocation_id": execution.invocation_id,
            "status": execution.status.value,
            "cause": None if cause is None else cause.value,
            "retry_count": execution.retry_count,
        },
    )


def template_event(template: Template, what: str, at: datetime) -> Event:
    """`what` is created, changed, building, ready, failed or removed."""
    return Event(
        f"template.{what}",
        template.id,
        at,
        {"version": template.number, "status": template.status.value},
    )
