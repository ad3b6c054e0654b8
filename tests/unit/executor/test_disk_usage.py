"""Measuring the disk usage of a workspace. Also run as an ordinary user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.executor.files.disk_usage import disk_use
from tests.unit.executor.descriptors import held

BIG = 1024 * 1024


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o200, 0o300, 0o400, 0o500, 0o600, 0o700])
@pytest.mark.parametrize("closed", ["a", "a/b", "."])
def test_files_in_a_closed_directory_are_counted(tmp_path: Path, mode: int, closed: str) -> None:
    top = tmp_path / "workspace"
    (top / "a/b").mkdir(parents=True)
    (top / "other").mkdir()
    for path in ("a/b/big", "other/big"):
        (top / path).write_bytes(os.urandom(BIG))
    (top / closed).chmod(mode)
    try:
        used, whole = disk_use(str(top))
        assert (used >= 2 * BIG, whole) == (True, True)
        assert used < 2 * BIG + 64 * 1024
    finally:
        (top / closed).chmod(0o700)


def test_a_readable_directory_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "fixed").mkdir(mode=0o555)
    disk_use(str(tmp_path))
    assert (tmp_path / "fixed").stat().st_mode & 0o777 == 0o555


def test_descriptors_are_closed(tmp_path: Path) -> None:
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a").chmod(0o400)
    disk_use(str(tmp_path))
    assert disk_use(str(tmp_path / "nothing")) == (0, False)
    assert held(tmp_path) == []
