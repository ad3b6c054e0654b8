"""
What has to be done so that a session becomes what is wanted of it.

The table is the whole of it: for what is wanted and what is observed, one step. A session for which
it says `rest` is left alone until a timer of its own runs out, which changes what is wanted. The
documentation's diagram is drawn from the table.
"""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from atoll.model.session import Cause, Session, SessionStatus, Wanted, Warning

if TYPE_CHECKING:
    from atoll.model.node import Node


class Observed(StrEnum):
    """A session's status, with all ends as one and the way there as another."""

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
    """It has ended, and something of it is on its node still."""
    DESTROYED = "destroyed"
    """Nothing of it is left but its record, its results and, for a while, its last checkpoint."""


class Step(StrEnum):
    REST = "rest"
    """Nothing, until a timer runs out or something else is wanted."""
    START = "start"
    """Make an instance, with the files that are there or those of the blob store."""
    PAUSE = "pause"
    """Let the instance stand still; it keeps its memory."""
    RESUME = "resume"
    """Let it go on."""
    STOP = "stop"
    """End the instance; the files stay."""
    ARCHIVE = "archive"
    """Move the files to the blob store."""
    HEAL = "heal"
    """Look at what is really there, and go on from that."""
    CLEAR = "clear"
    """Remove what an ended session has on its node."""


_UP = (Observed.CREATING, Observed.STARTING, Observed.RESTORING)
"""On the way to run."""

TABLE: dict[tuple[Wanted, Observed], Step] = {
    **{(Wanted.RUNNING, observed): Step.START for observed in _UP},
    (Wanted.RUNNING, Observed.RUNNING): Step.REST,
    (Wanted.RUNNING, Observed.PAUSING): Step.RESUME,
    (Wanted.RUNNING, Observed.PAUSED): Step.RESUME,
    (Wanted.RUNNING, Observed.STOPPING): Step.STOP,
    (Wanted.RUNNING, Observed.STOPPED): Step.START,
    (Wanted.RUNNING, Observed.ARCHIVING): Step.START,
    (Wanted.RUNNING, Observed.ARCHIVED): Step.START,
    (Wanted.RUNNING, Observed.ERROR): Step.HEAL,
    **{(Wanted.PAUSED, observed): Step.START for observed in _UP},
    (Wanted.PAUSED, Observed.RUNNING): Step.PAUSE,
    (Wanted.PAUSED, Observed.PAUSING): Step.PAUSE,
    (Wanted.PAUSED, Observed.PAUSED): Step.REST,
    (Wanted.PAUSED, Observed.STOPPING): Step.STOP,
    (Wanted.PAUSED, Observed.STOPPED): Step.REST,
    (Wanted.PAUSED, Observed.ARCHIVING): Step.ARCHIVE,
    (Wanted.PAUSED, Observed.ARCHIVED): Step.REST,
    (Wanted.PAUSED, Observed.ERROR): Step.HEAL,
    **{(Wanted.STOPPED, observed): Step.STOP for observed in _UP},
    (Wanted.STOPPED, Observed.RUNNING): Step.STOP,
    (Wanted.STOPPED, Observed.PAUSING): Step.STOP,
    (Wanted.STOPPED, Observed.PAUSED): Step.STOP,
    (Wanted.STOPPED, Observed.STOPPING): Step.STOP,
    (Wanted.STOPPED, Observed.STOPPED): Step.REST,
    (Wanted.STOPPED, Observed.ARCHIVING): Step.STOP,
    (Wanted.STOPPED, Observed.ARCHIVED): Step.REST,
    (Wanted.STOPPED, Observed.ERROR): Step.HEAL,
    **{(Wanted.ARCHIVED, observed): Step.STOP for observed in _UP},
    (Wanted.ARCHIVED, Observed.RUNNING): Step.STOP,
    (Wanted.ARCHIVED, Observed.PAUSING): Step.STOP,
    (Wanted.ARCHIVED, Observed.PAUSED): Step.STOP,
    (Wanted.ARCHIVED, Observed.STOPPING): Step.STOP,
    (Wanted.ARCHIVED, Observed.STOPPED): Step.ARCHIVE,
    (Wanted.ARCHIVED, Observed.ARCHIVING): Step.ARCHIVE,
    (Wanted.ARCHIVED, Observed.ARCHIVED): Step.REST,
    (Wanted.ARCHIVED, Observed.ERROR): Step.HEAL,
    # Whatever a session is when it is given up, it has ended with that, in the same write.
    **{(Wanted.DESTROYED, observed): Step.CLEAR for observed in Observed},
    **{(wanted, Observed.DESTROYING): Step.CLEAR for wanted in Wanted},
    **{(wanted, Observed.DESTROYED): Step.REST for wanted in Wanted},
}


_LEADS: dict[Step, tuple[Observed, ...]] = {
    Step.REST: (),
    Step.START: (Observed.STARTING, Observed.RESTORING),
    Step.PAUSE: (Observed.PAUSING,),
    Step.RESUME: (Observed.RUNNING,),
    Step.STOP: (Observed.STOPPING,),
    Step.ARCHIVE: (Observed.ARCHIVING,),
    Step.HEAL: (Observed.RUNNING, Observed.PAUSED, Observed.STARTING, Observed.STOPPED),
    Step.CLEAR: (Observed.DESTROYED,),
}
_ENDS = {
    **{(Step.START, observed): Observed.RUNNING for observed in _UP},
    (Step.PAUSE, Observed.PAUSING): Observed.PAUSED,
    (Step.STOP, Observed.STOPPING): Observed.STOPPED,
    (Step.ARCHIVE, Observed.ARCHIVING): Observed.ARCHIVED,
}


def leads_to(wanted: Wanted, observed: Observed) -> tuple[Observed, ...]:
    """What the step makes of a session next, if it goes well: one of these, by what is there."""
    step = TABLE[wanted, observed]
    if (end := _ENDS.get((step, observed))) is not None:
        return (end,)
    if step is Step.HEAL and wanted in (Wanted.STOPPED, Wanted.ARCHIVED):
        return tuple(state for state in _LEADS[step] if state is not Observed.STARTING)
    return _LEADS[step]


@dataclasses.dataclass(frozen=True, slots=True)
class Timer:
    """Something that is due by itself: what is wanted then, and why."""

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
    """The first of the session's own timers; none of one that has ended or is not settled."""
    if session.status.ended or next_step(session) is not Step.REST:
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
    """From when on there is something to do for it; none when it is what is wanted."""
    if next_step(session) is Step.REST:
        return None
    return session.retry_at or session.updated_at


def timer_at(session: Session) -> datetime | None:
    """
    When a timer of it runs out. The life of one that is not settled goes on as well: what takes
    too long to start ends, and so does what is to rest and cannot come to.
    """
    found = timer(session)
    if found is not None:
        return found.at
    if session.status.ended:
        return None
    if session.rested_at is None:
        return session.expires_at
    if session.delete_after is None or session.wanted not in (Wanted.STOPPED, Wanted.ARCHIVED):
        return None
    return _later(session.rested_at, session.delete_after)


MEMORY_LOST = Warning(
    "memory_lost",
    "Its node was lost or drained: it goes on elsewhere with its files as they were last saved; "
    "processes, contexts and memory are gone.",
)


def moved(session: Session, node: Node, now: datetime) -> Session:
    """The session on another node, where it starts with the files of its last checkpoint."""
    if session.status.ended:
        return session
    if session.status.at_rest or session.status is SessionStatus.STOPPING:
        resting = session.status is not SessionStatus.ARCHIVED
        status = SessionStatus.STOPPED if resting else SessionStatus.ARCHIVED
        warnings = session.warnings
    elif session.status is SessionStatus.ARCHIVING:
        status, warnings = SessionStatus.STOPPED, session.warnings
    else:
        fresh = session.status is SessionStatus.CREATING
        status = SessionStatus.CREATING if fresh else SessionStatus.RESTORING
        others = tuple(item for item in session.warnings if item.code != MEMORY_LOST.code)
        warnings = others if fresh else (*others, MEMORY_LOST)
    rested = status in (SessionStatus.STOPPED, SessionStatus.ARCHIVED)
    return dataclasses.replace(
        session,
        status=status,
        # Memory is gone, so there is nothing left to stand still.
        wanted=Wanted.RUNNING if session.wanted is Wanted.PAUSED else session.wanted,
        runtime_node=node.id,
        runtime_type=node.type,
        instance_id=None,
        workspace=None,
        rested_at=(session.rested_at or now) if rested else None,
        failures=0,
        retry_at=None,
        warnings=warnings,
        updated_at=now,
    )
