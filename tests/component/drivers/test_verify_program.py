"""Which files of an untrusted installation are kept: those listed by wheels of the index."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from atoll.drivers.shared.packages import verify_program
from atoll.drivers.shared.packages.wheel_files import MAX_DEPTH, Rejected
from tests.servers.index import wheel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PYTHON = "/usr/local/bin/python3"


class Installed:
    """A directory with packages, as an installer leaves it, and the wheels that they are of."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.target = place / "target"
        self.kept = place / "kept"
        self.wheels: list[dict[str, str]] = []

    def add(self, name: str, **about: Any) -> Path:
        file, content, _ = wheel(name, **about)
        path = self.place / file
        path.write_bytes(content)
        self.wheels.append({"path": str(path), "digest": hashlib.sha256(content).hexdigest()})
        with zipfile.ZipFile(path) as archive:
            archive.extractall(self.target)
        return path

    def collect(self, **about: Any) -> list[list[str]]:
        request = {
            "source": str(self.target),
            "target": str(self.kept),
            "python": PYTHON,
            "wheels": self.wheels,
            "source_builds": False,
            **about,
        }
        return verify_program.verify(request)


@pytest.fixture
def installed(tmp_path: Path) -> Installed:
    made = Installed(tmp_path)
    made.add("plain", scripts={"say": "plain:main"}, files={"plain_data/x.txt": "x"})
    return made


def test_only_files_of_the_wheels_are_kept_and_scripts_are_written(
    installed: Installed,
) -> None:
    installed.add("beside", files={"plain_data/x.txt": "x"})  # Two may bring the same file.
    (installed.target / "bin").mkdir()
    (installed.target / "bin/say").write_text("anything")
    (installed.target / "__pycache__").mkdir()
    (installed.target / "__pycache__/plain.cpython-311.pyc").write_bytes(b"bytecode")
    (installed.target / ".lock").touch()
    (installed.target / "plain-1.0.dist-info/REQUESTED").touch()
    (installed.target / "plain.py").chmod(0o6777)

    found = installed.collect()

    digests = sorted(each["digest"] for each in installed.wheels)
    assert sorted(digest for _, digest in found) == digests
    assert [info for info, _ in found] == ["beside-1.0.dist-info", "plain-1.0.dist-info"]
    assert (installed.kept / "plain_data/x.txt").read_text() == "x"
    assert (installed.kept / "bin/say").read_text().startswith(f"#!{PYTHON}\nimport sys\n")
    assert stat.S_IMODE((installed.kept / "bin/say").stat().st_mode) == 0o755
    assert stat.S_IMODE((installed.kept / "plain.py").stat().st_mode) == 0o755
    assert (installed.kept / "__pycache__/plain.cpython-311.pyc").exists()
    assert not (installed.kept / ".lock").exists()
    record = (installed.kept / "plain-1.0.dist-info/RECORD").read_text()
    assert "bin/say,sha256=" in record
    assert (installed.kept / "plain-1.0.dist-info/INSTALLER").read_text() == "uv\n"


def _replace_by_link(target: Path) -> None:
    (target / "plain.py").unlink()
    (target / "plain.py").symlink_to("/etc/passwd")


def _replace_directory_by_link(target: Path) -> None:
    (target / "plain_data").rename(target.parent / "elsewhere")
    (target / "plain_data").symlink_to(target.parent / "elsewhere")


def _nest(target: Path) -> None:
    (target / ("d/" * (MAX_DEPTH + 1))).mkdir(parents=True)


def _replace_by_pipe(target: Path) -> None:
    (target / "plain.py").unlink()
    os.mkfifo(target / "plain.py")


def _bytecode_alone(target: Path) -> None:
    (target / "__pycache__").mkdir()
    (target / "__pycache__/other.cpython-311.pyc").touch()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda top: (top / "plain.py").write_text("evil"), "differs from the file in its wheel"),
        (lambda top: (top / "sitecustomize.py").touch(), "No package lists"),
        (lambda top: (top / "x.pth").write_text("import os"), "No package lists"),
        (lambda top: (top / "plain-1.0.dist-info/more").touch(), "No package lists"),
        (lambda top: (top / "python3").symlink_to("/bin/sh"), "No package lists"),
        (lambda top: (top / "plain.py").unlink(), "lacks its file"),
        (lambda top: (top / "plain-1.0.dist-info").rename(top / "other-1.dist-info"), "not from a"),
        (_bytecode_alone, "No package lists"),
        (_replace_by_link, "cannot be read"),
        (_replace_directory_by_link, "No package lists"),
        (_replace_by_pipe, "not a regular file"),
        (_nest, "deeper than"),
    ],
    ids=[
        "changed", "module", "path", "metadata", "link", "missing", "renamed", "bytecode",
        "link in its place", "link on the way", "pipe", "deep",
    ],
)  # fmt: skip
def test_files_changed_by_an_image_are_refused(
    installed: Installed, change: Callable[[Path], object], words: str
) -> None:
    change(installed.target)
    with pytest.raises(Rejected, match=words):
        installed.collect()


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"files": {"../x.py": ""}}, "lists"),
        ({"files": {"/x.py": ""}}, "lists"),
        ({"files": {"d/" * MAX_DEPTH + "x.py": ""}}, "deeper than"),
        ({"scripts": {"../say": "plain:main"}}, "entry point"),
        ({"scripts": {"say": "os;x:main"}}, "entry point"),
        ({"files": {"bad-1.0.data/unknown/x": ""}}, "has files for"),
    ],
    ids=["up", "absolute", "deep", "script", "code", "kind"],
)
def test_a_wheel_with_forbidden_entries_is_refused(
    installed: Installed, about: dict[str, Any], words: str
) -> None:
    installed.add("bad", **about)
    with pytest.raises(Rejected, match=words):
        installed.collect()


def test_built_wheels_are_kept_only_where_builds_are_allowed(installed: Installed) -> None:
    built = installed.add("built", scripts={"run": "built:main"})
    installed.wheels = [each for each in installed.wheels if each["path"] != str(built)]
    with pytest.raises(Rejected, match="not from a wheel"):
        installed.collect()
    assert ["built-1.0.dist-info", ""] in installed.collect(source_builds=True)
    assert (installed.kept / "bin/run").exists()


def test_verification_runs_as_a_program_with_limits(installed: Installed) -> None:
    boot = "import sys; sys.path.insert(0, sys.argv[1]); "
    boot += f"from {verify_program.__name__} import main; main()"
    source = verify_program.__file__.partition("/atoll/drivers")[0]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", boot, source],
        input=json.dumps(
            {
                "image": None, "mount": "", "source": str(installed.place / "absent"),
                "target": str(installed.kept), "python": PYTHON, "wheels": [],
                "source_builds": False,
            }
        ),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == {"error": "Nothing was installed."}
