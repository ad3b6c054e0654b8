"""Progress messages of an engine as lines of a log."""

from __future__ import annotations

from typing import Any

from atoll.drivers.docker.progress import MAX_LINES, ProgressLines


def progress_lines(*messages: dict[str, Any]) -> list[str]:
    progress = ProgressLines()
    return [text for message in messages if (text := progress.text(message))]


def test_a_layer_is_logged_at_each_quarter_and_each_status() -> None:
    ticks = [
        {"id": "a1", "status": "Downloading", "progressDetail": {"current": now, "total": 1000}}
        for now in range(0, 1001, 3)
    ]
    begun, ended = {"id": "a1", "status": "Waiting"}, {"id": "a1", "status": "Pull complete"}

    assert progress_lines(begun, begun, *ticks, ended, ended) == [
        "a1: Waiting\n",
        "a1: Downloading\n",
        "a1: Downloading 25%\n",
        "a1: Downloading 50%\n",
        "a1: Downloading 75%\n",
        "a1: Pull complete\n",
    ]


def test_output_of_commands_is_logged_unchanged() -> None:
    assert progress_lines({"stream": "a"}, {"stream": "a"}, {"aux": {"ID": "x"}}) == ["a", "a"]


def test_the_number_of_lines_is_limited() -> None:
    messages = [{"id": f"{number}", "status": "Waiting"} for number in range(MAX_LINES * 2)]

    assert len(progress_lines(*messages)) == MAX_LINES


def test_malformed_messages_are_ignored() -> None:
    odd: list[dict[str, Any]] = [
        {}, {"status": 1}, {"status": ""}, {"id": 3, "status": None},
        {"progressDetail": {"current": "x"}},
    ]  # fmt: skip
    assert progress_lines(*odd) == []
    strange = {"id": "a", "status": "b", "progressDetail": {"current": 9, "total": 0}}
    assert progress_lines(strange) == ["a: b\n"]
