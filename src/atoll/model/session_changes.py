"""Changes of a session's record, as pure functions: each returns the changed record."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING

from atoll.model import plan
from atoll.model.plan import Step
from atoll.model.session import Cause, Session, SessionStatus, Wanted, Warning, WorkspaceMode

if TYPE_CHECKING:
    from datetime import datetime

KEEPS_INSTANCE = (
    SessionStatus.CREATING,
    SessionStatus.STARTING,
    SessionStatus.RESTORING,
    SessionStatus.RUNNING,
    SessionStatus.PAUSING,
    SessionStatus.PAUSED,
    SessionStatus.ERROR,
)
"""Statuses in which the session keeps the instance that its record names."""
STOPPED_STATES = (Wanted.STOPPED, Wanted.ARCHIVED)
NOT_SAVED = "workspace_not_saved"
"""Code of the warning that a workspace is on its node's disk alone."""


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
    if session.rested_at is None or session.status not in KEEPS_INSTANCE:
        return session
    return dataclasses.replace(
        session, rested_at=None, expires_at=now + timedelta(seconds=session.timeout)
    )


def wanting(session: Session, wanted: Wanted, cause: Cause | None, now: datetime) -> Session:
    """The session with another wanted state."""
    stops = wanted in STOPPED_STATES
    base = session if stops else without_stop(session, now)
    if session.wanted in STOPPED_STATES:
        cause = session.cause or cause
    return dataclasses.replace(
        base,
        wanted=wanted,
        cause=cause,
        rested_at=(session.rested_at or now) if stops else base.rested_at,
        failures=0,
        retry_at=None,
        active_at=session.active_at if stops else now,
        updated_at=now,
    )


def wanted_by_request(session: Session, now: datetime) -> Session:
    """The session, wanted to run because a request needs it."""
    return dataclasses.replace(
        without_stop(session, now),
        wanted=Wanted.RUNNING,
        failures=0,
        retry_at=None,
        active_at=now,
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


def starting(session: Session, now: datetime) -> Session:
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


def as_running(session: Session, now: datetime) -> Session:
    return dataclasses.replace(
        without_stop(session, now),
        status=SessionStatus.RUNNING,
        cause=None,
        message=None,
        failures=0,
        retry_at=None,
        updated_at=now,
    )


def kept_running(session: Session, now: datetime) -> Session:
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


def replace_save_warning(session: Session, *warnings: Warning) -> Session:
    """The session with these warnings about its checkpoint instead of earlier ones."""
    others = tuple(item for item in session.warnings if item.code != NOT_SAVED)
    return dataclasses.replace(session, warnings=(*others, *warnings))


def merge_warnings(session: Session, *warnings: Warning) -> Session:
    """The session with these warnings, each instead of earlier ones with its code."""
    codes = {warning.code for warning in warnings}
    others = tuple(item for item in session.warnings if item.code not in codes)
    return dataclasses.replace(session, warnings=(*others, *warnings))
