"""What changes of a session do to its record."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.model import plan
from atoll.model.node import Node
from atoll.model.plan import Step
from atoll.model.session import ENDED, SessionStatus, Wanted, Warning
from atoll.model.session_changes import MEMORY_LOST, moved
from tests.unit.model.test_plan import ARCHIVED, NOW, STOPPED, after, session

THERE = Node("there", "docker", "http://there")
OTHER = Warning("other", "Something else.")


@pytest.mark.parametrize(
    ("fields", "status", "wanted", "warnings"),
    [
        ({}, SessionStatus.RESTORING, Wanted.RUNNING, (MEMORY_LOST,)),
        ({"status": SessionStatus.CREATING}, SessionStatus.CREATING, Wanted.RUNNING, ()),
        (
            {"status": SessionStatus.STARTING},
            SessionStatus.RESTORING, Wanted.RUNNING, (MEMORY_LOST,),
        ),
        ({"status": SessionStatus.ERROR}, SessionStatus.RESTORING, Wanted.RUNNING, (MEMORY_LOST,)),
        (
            {"status": SessionStatus.PAUSED, "wanted": Wanted.PAUSED},
            SessionStatus.RESTORING, Wanted.RUNNING, (MEMORY_LOST,),
        ),
        (
            {"status": SessionStatus.STOPPING, "wanted": Wanted.STOPPED},
            SessionStatus.STOPPED, Wanted.STOPPED, (),
        ),
        (STOPPED, SessionStatus.STOPPED, Wanted.STOPPED, ()),
        (STOPPED | {"wanted": Wanted.RUNNING}, SessionStatus.STOPPED, Wanted.RUNNING, ()),
        (
            STOPPED | {"status": SessionStatus.ARCHIVING, "wanted": Wanted.ARCHIVED},
            SessionStatus.STOPPED, Wanted.ARCHIVED, (),
        ),
        (ARCHIVED, SessionStatus.ARCHIVED, Wanted.ARCHIVED, ()),
        (
            {"warnings": (MEMORY_LOST, OTHER)},
            SessionStatus.RESTORING, Wanted.RUNNING, (OTHER, MEMORY_LOST),
        ),
        (STOPPED | {"warnings": (OTHER,)}, SessionStatus.STOPPED, Wanted.STOPPED, (OTHER,)),
    ],
    ids=[
        "runs", "is created", "starts", "in error", "paused", "is stopped", "stopped",
        "about to start", "is archived", "archived", "moved before", "other warnings at rest",
    ],
)  # fmt: skip
def test_a_moved_session_has_a_new_status_and_warnings(
    fields: dict[str, Any],
    status: SessionStatus,
    wanted: Wanted,
    warnings: tuple[Warning, ...],
) -> None:
    found = moved(session(failures=3, retry_at=after(60), **fields), THERE, after(100))

    assert (found.status, found.wanted, found.warnings) == (status, wanted, warnings)
    assert (found.runtime_node, found.runtime_type) == ("there", "docker")
    assert (found.instance_id, found.workspace) == (None, None)
    assert (found.failures, found.retry_at, found.updated_at) == (0, None, after(100))
    rests = status in (SessionStatus.STOPPED, SessionStatus.ARCHIVED)
    assert found.rested_at == ((fields.get("rested_at") or after(100)) if rests else None)


@pytest.mark.parametrize("status", sorted(ENDED))
def test_an_ended_session_stays_on_its_node(status: SessionStatus) -> None:
    ended = session(status=status, wanted=Wanted.DESTROYED)

    assert moved(ended, THERE, after(100)) is ended


@given(st.sampled_from(SessionStatus), st.sampled_from(Wanted))
def test_a_moved_session_settles_on_its_new_node(status: SessionStatus, wanted: Wanted) -> None:
    found = moved(session(status=status, wanted=wanted), THERE, NOW)
    if not status.ended and wanted is not Wanted.DESTROYED:
        # No step that needs an instance, which does not exist there.
        assert plan.next_step(found) in (Step.START, Step.NONE, Step.ARCHIVE, Step.STOP)
