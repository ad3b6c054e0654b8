"""The interpreter that is mounted into containers of images without Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from atoll.drivers.shared import portable_interpreter
from atoll.errors import PermanentError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return portable_interpreter.write(tmp_path_factory.mktemp("node"))


def run(place: Path, code: str) -> str:
    """
    Run code with a copy of the interpreter. HOME is set, because Python would otherwise load
    libraries of the system to look up the user.
    """
    words = [*portable_interpreter.command(str(place)), "-I", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={"HOME": "/"})
    return done.stdout


@pytest.mark.slow
def test_a_copy_in_another_directory_uses_only_its_own_files(written: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(written, tmp_path / "elsewhere", symlinks=True)
    code = "import ctypes, select, socket, ssl, sys, zlib; print(sys.prefix, sys.executable)"
    assert run(directory, code) == f"{directory} {directory}/bin/python3\n"
    seen = run(
        directory, "import ssl\nfor line in open('/proc/self/maps'): print(line.split()[-1])"
    )
    libraries = {line for line in seen.splitlines() if ".so" in line}
    assert libraries
    assert all(line.startswith(str(directory)) for line in libraries), libraries


def test_the_interpreter_is_written_once(written: Path) -> None:
    before = written.stat().st_ino
    assert portable_interpreter.write(written.parent) == written
    assert written.stat().st_ino == before
    assert [path.name for path in written.parent.iterdir()] == [written.name]


def test_all_users_can_read_the_interpreter_and_only_its_owner_can_change_it(written: Path) -> None:
    for path in (written, *written.rglob("*")):
        if not path.is_symlink():
            assert path.stat().st_mode & 0o7777 in (0o755, 0o644), path


def test_the_interpreter_contains_no_packages_and_no_tests(written: Path) -> None:
    names = {path.name for path in written.rglob("*")}
    assert names.isdisjoint({"site-packages", "test", "idlelib", "ensurepip", "tkinter"})


@pytest.mark.parametrize("prepare", ["no ldd", "static binary"])
def test_the_error_for_an_interpreter_that_cannot_be_copied_contains_advice(
    prepare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if prepare == "no ldd":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        static = shutil.which("ldconfig", path="/usr/sbin:/sbin")
        assert static is not None
        monkeypatch.setattr(sys, "executable", os.path.realpath(static))
    with pytest.raises(PermanentError, match="Use an image with Python") as refused:
        portable_interpreter.write(tmp_path)
    assert refused.value.code == "interpreter_missing"
    assert list(tmp_path.iterdir()) == []
