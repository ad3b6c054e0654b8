"""Bounds of what a request may say."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from atoll.api.rest.requests import MAX_METADATA, Execute, Invoke
from atoll.model.execution import Mode

ROOM = MAX_METADATA - len(json.dumps({"a": "", "b": "", "c": ""}))


@pytest.mark.parametrize("letter", ["x", "\0", "\N{MUSICAL SYMBOL G CLEF}"])
def test_metadata_is_bounded_by_what_it_takes_in_the_row(letter: str) -> None:
    most = ROOM // (len(json.dumps(letter)) - 2)
    third = most // 3

    def invoke(last: int) -> Invoke:
        metadata = {"a": letter * third, "b": letter * third, "c": letter * last}
        return Invoke(session_id="sess_1", code="1", metadata=metadata)

    taken = invoke(most - 2 * third)
    assert taken.request(1.0).metadata == taken.metadata
    with pytest.raises(ValidationError, match="at most 8192 bytes"):
        invoke(most - 2 * third + 1)


def test_whoever_waits_for_an_execution_is_in_mode_sync() -> None:
    assert Execute(code="1", wait=1).request(1.0).mode is Mode.SYNC
    assert Execute(code="1").request(1.0).mode is Mode.ASYNC
    assert Invoke(session_id="s", code="1", mode=Mode.STREAM).request(1.0).mode is Mode.STREAM
