"""Displays of a context, which user code can forge."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.link.values import is_within
from atoll.model.json_size import count_values
from atoll.protocol import frames
from atoll.service.executions import event_log
from atoll.service.executions.displays import MAX_DEPTH, MAX_VALUES, display_of


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_a_display_keeps_only_documented_fields() -> None:
    line = {"type": "result", "data": {"text/plain": "1"}, "metadata": {"a": 1}, "more": 2}
    assert display_of(line) == {
        "type": "result",
        "data": {"text/plain": "1"},
        "metadata": {"a": 1},
    }
    assert display_of({"type": "display", "data": {}}) == {
        "type": "display",
        "data": {},
        "metadata": {},
    }


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"type": "approval", "data": {}},
        {"type": ["result"], "data": {}},
        {"type": "result"},
        {"type": "result", "data": "text"},
        {"type": "result", "data": {"a": nested(1000)}},
    ],
)
def test_an_invalid_display_is_dropped(line: dict[str, Any]) -> None:
    assert display_of(line) is None


def test_the_depth_of_a_display_is_limited() -> None:
    assert is_within({"a": nested(MAX_DEPTH - 3)}, MAX_DEPTH)
    assert not is_within({"a": nested(MAX_DEPTH)}, MAX_DEPTH)


@pytest.mark.parametrize("line", [b"[1]", b"NaN", b'{"a":NaN}', b'{"a":1e999}', b"{", b"\xff", b""])
def test_a_line_that_is_not_a_json_object_is_dropped(line: bytes) -> None:
    lines = event_log.LineBuffer()
    assert list(lines.feed(line + b'\n{"b":')) == []
    assert list(lines.feed(b"1}\n")) == [{"b": 1}]


def test_a_question_is_returned_unchanged() -> None:
    line = {"id": "1", "state": "asked", "question": "Go on?", "data": [1], "timeout": 300.0}
    assert event_log.event_of(frames.APPROVAL, line) == line
    assert event_log.event_of(frames.DISPLAY, line) is None


@pytest.mark.parametrize(
    ("line", "count"),
    [
        (b"1", 1),
        (b'{"a":[1,2,"b"]}', 6),
        (b'{"a":"[,,,{\\"[,\\\\"}', 3),
        (b'["\\\\","\\\\\\",[["]', 3),
    ],
)
def test_values_are_counted_outside_strings_only(line: bytes, count: int) -> None:
    assert count_values(line, MAX_VALUES) == count


@pytest.mark.parametrize("unit", [b"{},", b'"a",', b"1,"])
def test_lines_that_would_use_much_more_memory_than_their_size_are_dropped(unit: bytes) -> None:
    lines = event_log.LineBuffer()
    half = b'{"data":[' + unit * (MAX_VALUES // 4) + b"0]}\n"
    assert list(lines.feed(b'{"data":[' + unit * MAX_VALUES + b"0]}\n")) == []
    # Of all lines together: what was shown is kept as long as the execution runs.
    assert len(list(lines.feed(half * 10))) == (1 if unit == b"{}," else 3)
    assert list(lines.feed(b'{"b":1}\n')) == [{"b": 1}]
