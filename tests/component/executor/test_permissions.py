"""Changing modes of files that other processes swap at the same time, also as root."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from typing import TYPE_CHECKING, Any

import pytest

from atoll.drivers.shared.file_trees import remove_tree
from atoll.executor.files import permissions
from atoll.executor.files.paths import FileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_on_chmod: list[Callable[[], None]] = []


def _hook(event: str, _: tuple[Any, ...]) -> None:
    if event == "os.chmod" and _on_chmod:
        _on_chmod.pop()()


sys.addaudithook(_hook)


@contextlib.contextmanager
def at_the_next_chmod(act: Callable[[], None]) -> Iterator[None]:
    """Runs `act` at the latest moment at which another process could run: just before the call."""
    _on_chmod.append(act)
    try:
        yield
        assert _on_chmod == [], "no rights were changed"
    finally:
        _on_chmod.clear()


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    directory = tmp_path / "outside"
    directory.mkdir()
    (directory / "f").write_text("of the host")
    directory.chmod(0o711)
    (directory / "f").chmod(0o604)
    return directory


def modes(outside: Path) -> tuple[int, int]:
    return stat.S_IMODE(outside.stat().st_mode), stat.S_IMODE((outside / "f").stat().st_mode)


def swap(path: Path, target: Path) -> Callable[[], None]:
    def act() -> None:
        path.rename(path.with_name("moved"))
        path.symlink_to(target)

    return act


def test_removing_a_tree_changes_no_permissions_through_a_link_in_place_of_a_directory(
    tmp_path: Path, outside: Path
) -> None:
    top = tmp_path / "tree"
    (top / "victim").mkdir(parents=True)
    with at_the_next_chmod(swap(top / "victim", outside)), contextlib.suppress(OSError):
        remove_tree(top)
    assert modes(outside) == (0o711, 0o604)
    assert (outside / "f").read_text() == "of the host"
    remove_tree(top)
    assert not top.exists()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_opening_a_file_changes_no_permissions_through_a_link(
    tmp_path: Path, outside: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "tree"
    (top / "d").mkdir(parents=True)
    victim = top / "d" / "victim"
    if kind == "file":
        victim.write_text("mine")
    else:
        victim.mkdir()
        (victim / "f").write_text("mine")
    victim.chmod(0)
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if os.geteuid() == 0:
            _refuse_first(monkeypatch)
        target = outside / "f" if kind == "file" else outside
        path = "d/victim" if kind == "file" else "d/victim/f"
        with (
            at_the_next_chmod(swap(victim, target)),
            contextlib.suppress(OSError, FileError),
        ):
            opened = permissions.open_file(fd, path)
            assert os.read(opened, 100) == b"mine"
            os.close(opened)
    finally:
        os.close(fd)
    assert modes(outside) == (0o711, 0o604)


def _refuse_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses root nothing: what has no rights is refused as to its owner."""
    real = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "victim" and not flags & os.O_PATH:
            found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
            if not found.st_mode & 0o400:
                raise PermissionError(13, "Permission denied")
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refusing)
