"""One change, as it is told to those who follow what happens, and the places on their feed."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from atoll.model import plan

if TYPE_CHECKING:
    from atoll.model.execution import Execution
    from atoll.model.session import Session
    from atoll.model.template import Template

LONGEST_TYPE = 64
"""Characters of one type, or pattern of types, that is asked for."""
MOST_TYPES = 32


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


@dataclass(frozen=True, slots=True)
class FeedRange:
    """What is kept of the feed."""

    first: int
    """The number of the oldest event that is kept, or would be if there were one."""
    last: int
    """The highest number that was given; one less than `first` when nothing is kept."""


@dataclass(frozen=True, slots=True)
class FeedPage:
    """A part of the feed that was looked through."""

    events: tuple[Event, ...]
    through: int
    """The number up to which no other event matches."""
    first: int
    """Of all that is kept; what came before it was not seen, whether it matches or not."""


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


def execution_event(execution: Execution, what: str, at: datetime) -> Event:
    """`what` it came to be: submitted, running, retried, or its last status."""
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
    """`what` it came to be: created, changed, building, ready, failed or removed."""
    return Event(
        f"template.{what}",
        template.id,
        at,
        {"version": template.number, "status": template.status.value},
    )
