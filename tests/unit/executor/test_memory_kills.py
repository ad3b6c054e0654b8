"""The kernel's count of processes that it killed because memory ran out."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.executor.runs.memory_kills import MemoryKills


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("low 0\nmax 31\noom 4\noom_kill {}\noom_group_kill 0\n", id="version 2"),
        pytest.param("oom_kill_disable 0\nunder_oom 0\noom_kill {}\n", id="version 1"),
    ],
)
def test_each_kill_is_reported_once(tmp_path: Path, content: str) -> None:
    file = tmp_path / "events"
    file.write_text(content.format(3))
    kills = MemoryKills((str(tmp_path / "absent"), str(file)))
    assert not kills.take()
    file.write_text(content.format(5))
    assert kills.take()
    assert not kills.take()


def test_no_kill_is_reported_without_a_control_group(tmp_path: Path) -> None:
    assert not MemoryKills((str(tmp_path / "absent"),)).take()
