"""Measuring a directory while other processes write to it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from atoll.drivers.shared.file_trees import MAX_DEPTH, TooDeep, deleted_size, tree_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MiB = 1024 * 1024
_on_open: list[Callable[[], None]] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.scandir") and _on_open and str(arguments[0]).endswith("swapped"):
        _on_open.pop()()


sys.addaudithook(_hook)


def test_a_directory_replaced_by_a_link_is_not_followed(tmp_path: Path) -> None:
    top, outside = tmp_path / "top", tmp_path / "outside"
    (top / "swapped").mkdir(parents=True)
    outside.mkdir()
    (outside / "large").write_bytes(bytes(MiB))

    def swap() -> None:
        (top / "swapped").rename(top / "moved")
        (top / "swapped").symlink_to(outside)

    _on_open.append(swap)
    assert tree_size(top) < MiB
    assert _on_open == []


def test_names_longer_than_a_path_are_counted(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(40):
        os.mkdir("d" * 200, dir_fd=fd)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    file = os.open("large", os.O_WRONLY | os.O_CREAT, dir_fd=fd)
    os.write(file, bytes(MiB))
    os.close(file)
    os.link("large", "again", src_dir_fd=fd, dst_dir_fd=fd)
    os.close(fd)
    assert MiB < tree_size(tmp_path) < 2 * MiB


def test_a_tree_that_is_too_deep_is_an_error_and_uses_few_descriptors(tmp_path: Path) -> None:
    (tmp_path / ("d/" * (MAX_DEPTH + 1))).mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TooDeep):
        tree_size(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_removed_files_that_are_still_open_are_counted(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "file = open(sys.argv[1], 'wb'); os.unlink(sys.argv[1])\n"
        "file.write(bytes(1 << 20)); file.flush(); print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "x")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert tree_size(tmp_path) == 0
        assert deleted_size(process.pid, tmp_path) >= MiB
        process.communicate()
