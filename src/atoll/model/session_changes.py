"""Changes of a session's record, as pure functions: each returns the changed record."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from atoll.model import plan
from atoll.model.plan import Step
from atoll.model.session import Cause, Session, SessionStatus, Wanted, Warning, WorkspaceMode

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.model.node import Node

REPLACED = "instance_replaced"
"""Code of the warning that a session goes on with another instance, and why."""
NOT_SAVED = "workspace_not_saved"
"""Code of the warning that a workspace is on its node's disk alone."""
WAITS_FOR_NODE = "waits_for_node"
"""Code of the warning of a session that cannot be moved."""
MEMORY_LOST = Warning(
    "memory_lost",
    "Its node was lost or drained. It continues on another node with the files of its last "
    "checkpoint; processes, contexts and memory are lost.",
)


def with_status(session: Session, status: SessionStatus, now: datetime) -> Session:
    """The session with a status that a step of the plan leads to."""
    stopped = status in (
        SessionStatus.STOPPING,
        SessionStatus.STOPPED,
        SessionStatus.ARCHIVING,
        SessionStatus.ARCHIVED,
    )
    settled = plan.TABLE[session.wanted, plan.Observed(status.value)] is Step.NONE
    return dataclasses.replace(
        session,
        status=status,
        rested_at=(session.rested_at or now) if stopped else None,
        failures=0 if settled else session.failures,
        retry_at=None,
        message=None if settled else session.message,
        updated_at=now,
    )


def without_stop(session: Session, now: datetime) -> Session:
    """The session with a new lifetime if it was to be stopped and its stop has not begun."""
    if session.rested_at is None or not session.status.keeps_instance:
        return session
    return dataclasses.replace(
        session, rested_at=None, expires_at=now + timedelta(seconds=session.timeout)
    )


def wanting(session: Session, wanted: Wanted, cause: Cause | None, now: datetime) -> Session:
    """The session with another wanted state."""
    base = session if wanted.stops else without_stop(session, now)
    if session.wanted.stops:
        cause = session.cause or cause
    return dataclasses.replace(
        base,
        wanted=wanted,
        cause=cause,
        rested_at=(session.rested_at or now) if wanted.stops else base.rested_at,
        failures=0,
        retry_at=None,
        active_at=session.active_at if wanted.stops else now,
        updated_at=now,
    )


def without_instance(session: Session, now: datetime) -> Session:
    """The session after its instance was lost."""
    creating = session.status is SessionStatus.CREATING
    return dataclasses.replace(
        session,
        status=SessionStatus.CREATING if creating else SessionStatus.STARTING,
        instance_id=None,
        updated_at=now,
    )


def starting_again(session: Session, now: datetime) -> Session:
    """A stopped or archived session that is being started, with a new lifetime."""
    restoring = session.workspace is None and session.workspace_mode is WorkspaceMode.SYNC
    return dataclasses.replace(
        session,
        status=SessionStatus.RESTORING if restoring else SessionStatus.STARTING,
        rested_at=None,
        cause=None,
        message=None,
        active_at=now,
        expires_at=now + timedelta(seconds=session.timeout),
        updated_at=now,
    )


def as_running(session: Session, now: datetime, **changes: Any) -> Session:
    """The session, running; `changes` are further fields."""
    return dataclasses.replace(
        without_stop(session, now),
        status=SessionStatus.RUNNING,
        cause=None,
        message=None,
        failures=0,
        retry_at=None,
        updated_at=now,
        **changes,
    )


def pause_cancelled(session: Session, now: datetime) -> Session:
    """A session whose pause was cancelled."""
    return dataclasses.replace(
        session, status=SessionStatus.RUNNING, wanted=Wanted.RUNNING, updated_at=now
    )


def ended(
    session: Session, status: SessionStatus, cause: Cause, message: str | None, now: datetime
) -> Session:
    return dataclasses.replace(
        session,
        status=status,
        wanted=Wanted.DESTROYED,
        cause=cause,
        message=message,
        ended_at=now,
        failures=0,
        retry_at=None,
        updated_at=now,
    )


def cleared(session: Session, now: datetime) -> Session:
    """An ended session that has nothing left on its node."""
    return dataclasses.replace(
        session, instance_id=None, workspace=None, retry_at=None, updated_at=now
    )


def moved(session: Session, node: Node, now: datetime) -> Session:
    """The session on another node, where it starts with the files of its last checkpoint."""
    if session.status.ended:
        return session
    status = session.status
    session = without_warnings(session, WAITS_FOR_NODE)
    if status in (SessionStatus.STOPPING, SessionStatus.ARCHIVING):
        status = SessionStatus.STOPPED
    elif not status.stopped_or_archived and status is not SessionStatus.CREATING:
        status = SessionStatus.RESTORING
        session = with_warnings(session, MEMORY_LOST)
    return dataclasses.replace(
        session,
        status=status,
        # Its memory is lost, so there is nothing to keep paused.
        wanted=Wanted.RUNNING if session.wanted is Wanted.PAUSED else session.wanted,
        runtime_node=node.id,
        runtime_type=node.type,
        instance_id=None,
        workspace=None,
        rested_at=(session.rested_at or now) if status.stopped_or_archived else None,
        failures=0,
        retry_at=None,
        updated_at=now,
    )


def with_warnings(session: Session, *warnings: Warning) -> Session:
    """The session with these warnings, each instead of an earlier one with its code."""
    if not warnings:
        return session
    others = without_warnings(session, *(warning.code for warning in warnings)).warnings
    return dataclasses.replace(session, warnings=(*others, *warnings))


def without_warnings(session: Session, *codes: str) -> Session:
    others = tuple(warning for warning in session.warnings if warning.code not in codes)
    if others == session.warnings:
        return session
    return dataclasses.replace(session, warnings=others)
