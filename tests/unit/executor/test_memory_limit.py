from __future__ import annotations

from pathlib import Path

import pytest

from atoll.executor.runs.memory_limit import memory_limit


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param("150994944\n", 150_994_944, id="a limit"),
        pytest.param("max\n", 0, id="no limit"),
        pytest.param("", 0, id="nothing"),
    ],
)
def test_the_limit_of_the_container_is_read(tmp_path: Path, content: str, expected: int) -> None:
    (tmp_path / "memory.max").write_text(content)
    assert memory_limit((str(tmp_path / "missing"), str(tmp_path / "memory.max"))) == expected


def test_without_a_control_group_no_limit_is_known(tmp_path: Path) -> None:
    assert memory_limit((str(tmp_path / "missing"),)) == 0
