"""Reading the contents of files for a checkpoint, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.executor.files import scan, workspace


class Listener:
    """The other end, which receives everything immediately."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.data = b""

    def event(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def send(self, kind: int, payload: bytes) -> None:
        self.data += payload


def test_a_recently_changed_file_is_read_only_after_the_clock_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On kernels that date files by their tick, two changes within one look alike."""
    path = tmp_path / "file"
    path.write_text("first")
    dated = path.stat().st_ctime_ns
    now = dated
    monkeypatch.setattr(scan, "coarse_now", lambda: now)
    listener = Listener()
    steps = scan.send_contents(workspace.Workspace(str(tmp_path)), ["file"], listener)  # type: ignore[arg-type]
    for _ in range(5):
        next(steps)
    assert listener.events == []

    path.write_text("other")
    now += 4_000_000
    for _ in steps:
        pass
    assert listener.data == b"other"
    assert [event["event"] for event in listener.events] == ["file", "over"]


def test_a_file_dated_in_the_future_is_read_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("first")
    ticks = iter(range(10))
    monkeypatch.setattr(scan, "coarse_now", lambda: next(ticks))
    listener = Listener()
    for _ in scan.send_contents(workspace.Workspace(str(tmp_path)), ["file"], listener):  # type: ignore[arg-type]
        pass
    assert listener.data == b"first"
