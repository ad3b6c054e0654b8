"""The interpreter that is lent to images without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from atoll.drivers.docker import portable_interpreter
from atoll.errors import PermanentError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return portable_interpreter.write(tmp_path_factory.mktemp("lent"))


def run(place: Path, code: str) -> str:
    """
    Away from where it was made. Without a home in its environment it would ask for the user's, of
    libraries that are the system's.
    """
    words = [*portable_interpreter.command(str(place)), "-I", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=True, env={"HOME": "/"})
    return done.stdout


@pytest.mark.slow
def test_it_is_whole_and_finds_itself_wherever_it_is(lent: Path, tmp_path: Path) -> None:
    place = shutil.copytree(lent, tmp_path / "elsewhere", symlinks=True)
    code = "import ctypes, select, socket, ssl, sys, zlib; print(sys.prefix, sys.executable)"
    assert run(place, code) == f"{place} {place}/bin/python3\n"
    seen = run(place, "import ssl\nfor line in open('/proc/self/maps'): print(line.split()[-1])")
    libraries = {line for line in seen.splitlines() if ".so" in line}
    assert libraries
    assert all(line.startswith(str(place)) for line in libraries), libraries


def test_it_is_made_once(lent: Path) -> None:
    before = lent.stat().st_ino
    assert portable_interpreter.write(lent.parent) == lent
    assert lent.stat().st_ino == before
    assert [path.name for path in lent.parent.iterdir()] == [lent.name]


def test_anybody_may_read_it_and_only_its_owner_change_it(lent: Path) -> None:
    for path in (lent, *lent.rglob("*")):
        if not path.is_symlink():
            assert path.stat().st_mode & 0o7777 in (0o755, 0o644), path


def test_it_brings_no_packages_and_no_tests(lent: Path) -> None:
    names = {path.name for path in lent.rglob("*")}
    assert names.isdisjoint({"site-packages", "test", "idlelib", "ensurepip", "tkinter"})


@pytest.mark.parametrize("prepare", ["no ldd", "a static one"])
def test_one_that_cannot_be_lent_is_told_with_what_to_do(
    prepare: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if prepare == "no ldd":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        static = shutil.which("ldconfig", path="/usr/sbin:/sbin")
        assert static is not None
        monkeypatch.setattr(sys, "executable", os.path.realpath(static))
    with pytest.raises(PermanentError, match="Take an image with Python") as refused:
        portable_interpreter.write(tmp_path)
    assert refused.value.code == "interpreter_missing"
    assert list(tmp_path.iterdir()) == []
