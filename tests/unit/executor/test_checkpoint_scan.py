"""Reading the contents of files for a checkpoint, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.executor.files import checkpoint_scan, workspace


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
    monkeypatch.setattr(checkpoint_scan, "coarse_now", lambda: now)
    stream = Listener()
    steps = checkpoint_scan.send_contents(workspace.Workspace(str(tmp_path)), ["file"], stream)  # type: ignore[arg-type]
    for _ in range(5):
        next(steps)
    assert stream.events == []

    path.write_text("other")
    now += 4_000_000
    for _ in steps:
        pass
    assert stream.data == b"other"
    assert [event["event"] for event in stream.events] == ["file", "over"]


def test_a_file_dated_in_the_future_is_read_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("first")
    ticks = iter(range(10))
    monkeypatch.setattr(checkpoint_scan, "coarse_now", lambda: next(ticks))
    stream = Listener()
    for _ in checkpoint_scan.send_contents(workspace.Workspace(str(tmp_path)), ["file"], stream):  # type: ignore[arg-type]
        pass
    assert stream.data == b"first"
