"""
What to do next so that a session reaches its wanted status.

`TABLE` has one step for each pair of wanted and observed status. With `NONE`, nothing happens until
a timer of the session expires and changes the wanted status. The diagram in the documentation is
generated from the table.
"""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta
from enum import StrEnum

from atoll.model.session import Cause, Session, SessionStatus, Wanted


class Observed(StrEnum):
    """A session's status, with one value for all final ones and one for the cleanup before."""

    CREATING = "creating"
    STARTING = "starting"
    RESTORING = "restoring"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    STOPPING = "stopping"
    STOPPED = "stopped"
    ARCHIVING = "archiving"
    ARCHIVED = "archived"
    ERROR = "error"
    DESTROYING = "destroying"
    """It has ended, and its instance or files are still on its node."""
    DESTROYED = "destroyed"
    """Only its record, its results and, for a while, its last checkpoint are left."""


class Step(StrEnum):
    NONE = "rest"
    """Nothing, until a timer expires or another status is wanted."""
    START = "start"
    """Create an instance, with the files on the node or those in the blob store."""
    PAUSE = "pause"
    """Freeze the instance; it keeps its memory."""
    RESUME = "resume"
    """Unfreeze the instance."""
    STOP = "stop"
    """End the instance and keep the files."""
    ARCHIVE = "archive"
    """Move the files to the blob store."""
    HEAL = "heal"
    """Find out what exists on the node, and continue from there."""
    CLEAR = "clear"
    """Remove the instance and files of an ended session from its node."""


_STARTING = (Observed.CREATING, Observed.STARTING, Observed.RESTORING)
"""Statuses on the way to running."""

TABLE: dict[tuple[Wanted, Observed], Step] = {
    **{(Wanted.RUNNING, observed): Step.START for observed in _STARTING},
    (Wanted.RUNNING, Observed.RUNNING): Step.NONE,
    (Wanted.RUNNING, Observed.PAUSING): Step.RESUME,
    (Wanted.RUNNING, Observed.PAUSED): Step.RESUME,
    (Wanted.RUNNING, Observed.STOPPING): Step.STOP,
    (Wanted.RUNNING, Observed.STOPPED): Step.START,
    (Wanted.RUNNING, Observed.ARCHIVING): Step.START,
    (Wanted.RUNNING, Observed.ARCHIVED): Step.START,
    (Wanted.RUNNING, Observed.ERROR): Step.HEAL,
    **{(Wanted.PAUSED, observed): Step.START for observed in _STARTING},
    (Wanted.PAUSED, Observed.RUNNING): Step.PAUSE,
    (Wanted.PAUSED, Observed.PAUSING): Step.PAUSE,
    (Wanted.PAUSED, Observed.PAUSED): Step.NONE,
    (Wanted.PAUSED, Observed.STOPPING): Step.STOP,
    (Wanted.PAUSED, Observed.STOPPED): Step.NONE,
    (Wanted.PAUSED, Observed.ARCHIVING): Step.ARCHIVE,
    (Wanted.PAUSED, Observed.ARCHIVED): Step.NONE,
    (Wanted.PAUSED, Observed.ERROR): Step.HEAL,
    **{(Wanted.STOPPED, observed): Step.STOP for observed in _STARTING},
    (Wanted.STOPPED, Observed.RUNNING): Step.STOP,
    (Wanted.STOPPED, Observed.PAUSING): Step.STOP,
    (Wanted.STOPPED, Observed.PAUSED): Step.STOP,
    (Wanted.STOPPED, Observed.STOPPING): Step.STOP,
    (Wanted.STOPPED, Observed.STOPPED): Step.NONE,
    (Wanted.STOPPED, Observed.ARCHIVING): Step.STOP,
    (Wanted.STOPPED, Observed.ARCHIVED): Step.NONE,
    (Wanted.STOPPED, Observed.ERROR): Step.HEAL,
    **{(Wanted.ARCHIVED, observed): Step.STOP for observed in _STARTING},
    (Wanted.ARCHIVED, Observed.RUNNING): Step.STOP,
    (Wanted.ARCHIVED, Observed.PAUSING): Step.STOP,
    (Wanted.ARCHIVED, Observed.PAUSED): Step.STOP,
    (Wanted.ARCHIVED, Observed.STOPPING): Step.STOP,
    (Wanted.ARCHIVED, Observed.STOPPED): Step.ARCHIVE,
    (Wanted.ARCHIVED, Observed.ARCHIVING): Step.ARCHIVE,
    (Wanted.ARCHIVED, Observed.ARCHIVED): Step.NONE,
    (Wanted.ARCHIVED, Observed.ERROR): Step.HEAL,
    # Wanting it destroyed and ending it are the same write, whatever its status is.
    **{(Wanted.DESTROYED, observed): Step.CLEAR for observed in Observed},
    **{(wanted, Observed.DESTROYING): Step.CLEAR for wanted in Wanted},
    **{(wanted, Observed.DESTROYED): Step.NONE for wanted in Wanted},
}


_NEXT: dict[Step, tuple[Observed, ...]] = {
    Step.NONE: (),
    Step.START: (Observed.STARTING, Observed.RESTORING),
    Step.PAUSE: (Observed.PAUSING,),
    Step.RESUME: (Observed.RUNNING,),
    Step.STOP: (Observed.STOPPING,),
    Step.ARCHIVE: (Observed.ARCHIVING,),
    Step.HEAL: (Observed.RUNNING, Observed.PAUSED, Observed.STARTING, Observed.STOPPED),
    Step.CLEAR: (Observed.DESTROYED,),
}
_ENDS = {
    **{(Step.START, observed): Observed.RUNNING for observed in _STARTING},
    (Step.PAUSE, Observed.PAUSING): Observed.PAUSED,
    (Step.STOP, Observed.STOPPING): Observed.STOPPED,
    (Step.ARCHIVE, Observed.ARCHIVING): Observed.ARCHIVED,
}


def next_statuses(wanted: Wanted, observed: Observed) -> tuple[Observed, ...]:
    """The statuses that the step may lead to if it succeeds."""
    step = TABLE[wanted, observed]
    if (end := _ENDS.get((step, observed))) is not None:
        return (end,)
    if step is Step.HEAL and wanted.stops:
        return tuple(state for state in _NEXT[step] if state is not Observed.STARTING)
    return _NEXT[step]


@dataclasses.dataclass(frozen=True, slots=True)
class Timer:
    """When the wanted status changes automatically, to which one, and why."""

    at: datetime
    wanted: Wanted
    cause: Cause


def observed(session: Session) -> Observed:
    if not session.status.ended:
        return Observed(session.status.value)
    left = session.instance_id is not None or session.workspace is not None
    return Observed.DESTROYING if left else Observed.DESTROYED


def next_step(session: Session) -> Step:
    return TABLE[session.wanted, observed(session)]


def timer(session: Session) -> Timer | None:
    """The timer that expires first; None if the session has ended or is not settled."""
    if session.status.ended or next_step(session) is not Step.NONE:
        return None
    found: list[Timer] = []
    if session.rested_at is None:
        found.append(Timer(session.expires_at, Wanted.DESTROYED, Cause.TIMEOUT))
        if session.idle_timeout is not None:
            active = session.active_at or session.created_at
            idle = _later(active, session.idle_timeout)
            found.append(Timer(idle, Wanted.STOPPED, Cause.IDLE))
    else:
        if session.archive_after is not None and session.status is SessionStatus.STOPPED:
            at = _later(session.rested_at, session.archive_after)
            found.append(Timer(at, Wanted.ARCHIVED, Cause.IDLE))
        if session.delete_after is not None:
            at = _later(session.rested_at, session.delete_after)
            found.append(Timer(at, Wanted.DESTROYED, Cause.IDLE))
    return min(found, key=lambda item: item.at, default=None)


def _later(moment: datetime, seconds: int) -> datetime:
    try:
        return moment + timedelta(seconds=seconds)
    except OverflowError:
        return datetime.max.replace(tzinfo=moment.tzinfo)


def unsettled_at(session: Session) -> datetime | None:
    """The time of the next step; None if the session has its wanted status."""
    if next_step(session) is Step.NONE:
        return None
    return session.retry_at or session.updated_at


def timer_at(session: Session) -> datetime | None:
    """
    The time when `timer` expires. Sessions that are not settled expire as well: those that take too
    long to start, and those that should be stopped but cannot be.
    """
    found = timer(session)
    if found is not None:
        return found.at
    if session.status.ended:
        return None
    if session.rested_at is None:
        return session.expires_at
    if session.delete_after is None or not session.wanted.stops:
        return None
    return _later(session.rested_at, session.delete_after)
