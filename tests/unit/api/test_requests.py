"""Validation of request bodies, and what the services get of them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from atoll.api.rest.schemas.execution_requests import Execute
from atoll.api.rest.schemas.invocations import MAX_METADATA, Invoke
from atoll.api.rest.schemas.resources import ResourcesIn
from atoll.api.rest.schemas.sessions import CreateSession
from atoll.api.rest.schemas.templates import SecurityContext
from atoll.model.execution import Mode
from atoll.model.resources import Resources
from atoll.model.template import REQUIREMENTS

RESOURCES = Resources(1.0, 512 * 2**20, 2**30, 128)
ROOM = MAX_METADATA - len(json.dumps({"a": "", "b": "", "c": ""}))


@pytest.mark.parametrize("letter", ["x", "\0", "\N{MUSICAL SYMBOL G CLEF}"])
def test_metadata_is_bounded_by_its_size_as_json(letter: str) -> None:
    most = ROOM // (len(json.dumps(letter)) - 2)
    third = most // 3

    def invoke(last: int) -> Invoke:
        metadata = {"a": letter * third, "b": letter * third, "c": letter * last}
        return Invoke(session_id="sess_1", code="1", metadata=metadata)

    taken = invoke(most - 2 * third)
    assert taken.request(1.0).metadata == taken.metadata
    with pytest.raises(ValidationError, match="at most 8192 bytes"):
        invoke(most - 2 * third + 1)


def test_waiting_for_an_execution_means_mode_sync() -> None:
    assert Execute(code="1", wait=1).request(1.0).mode is Mode.SYNC
    assert Execute(code="1").request(1.0).mode is Mode.ASYNC
    assert Invoke(session_id="s", code="1", mode=Mode.STREAM).request(1.0).mode is Mode.STREAM


def test_a_template_can_require_only_known_names() -> None:
    SecurityContext(require=list(REQUIREMENTS))
    with pytest.raises(ValidationError):
        SecurityContext(require=["magic"])


def test_limits_that_are_not_given_come_from_the_template() -> None:
    wanted = CreateSession(memory="1Gi").limits(RESOURCES)

    assert wanted == replace(RESOURCES, memory=2**30)
    nested = CreateSession(resources=ResourcesIn(cpu="2")).limits(RESOURCES)
    assert nested == replace(RESOURCES, cpu=2.0)


@pytest.mark.parametrize("event", [float("nan"), [float("inf")], {"a": -float("inf")}], ids=str)
def test_an_event_that_json_cannot_hold_is_refused(event: Any) -> None:
    with pytest.raises(ValidationError):
        Execute(code="1", event=event)


@pytest.mark.parametrize("event", [None, 0, "", [], {}, {"a": [1, None]}], ids=str)
def test_an_event_is_any_json(event: Any) -> None:
    assert Execute(code="1", event=event).event == event
