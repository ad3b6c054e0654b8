"""What an engine tells of a pull, as lines."""

from __future__ import annotations

from typing import Any

from atoll.drivers.docker.progress import MAX_LINES, ProgressLines


def told(*messages: dict[str, Any]) -> list[str]:
    progress = ProgressLines()
    return [text for message in messages if (text := progress.text(message))]


def test_a_layer_is_told_of_at_each_quarter_and_at_each_change() -> None:
    ticks = [
        {"id": "a1", "status": "Downloading", "progressDetail": {"current": now, "total": 1000}}
        for now in range(0, 1001, 3)
    ]
    begun, ended = {"id": "a1", "status": "Waiting"}, {"id": "a1", "status": "Pull complete"}

    assert told(begun, begun, *ticks, ended, ended) == [
        "a1: Waiting\n",
        "a1: Downloading\n",
        "a1: Downloading 25%\n",
        "a1: Downloading 50%\n",
        "a1: Downloading 75%\n",
        "a1: Pull complete\n",
    ]


def test_what_is_printed_comes_as_it_is() -> None:
    assert told({"stream": "a"}, {"stream": "a"}, {"aux": {"ID": "x"}}) == ["a", "a"]


def test_there_are_no_more_lines_than_somebody_reads() -> None:
    messages = [{"id": f"{number}", "status": "Waiting"} for number in range(MAX_LINES * 2)]

    assert len(told(*messages)) == MAX_LINES


def test_what_is_not_as_it_should_be_is_left_out() -> None:
    odd: list[dict[str, Any]] = [
        {}, {"status": 1}, {"status": ""}, {"id": 3, "status": None},
        {"progressDetail": {"current": "x"}},
    ]  # fmt: skip
    assert told(*odd) == []
    strange = {"id": "a", "status": "b", "progressDetail": {"current": 9, "total": 0}}
    assert told(strange) == ["a: b\n"]
