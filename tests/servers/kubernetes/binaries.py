"""
Builds Kubernetes and etcd from Go modules, once, and caches the result.

The cache has a few compressed programs of about 50 MB; the modules and the build cache of Go, 3 GB,
are removed after a build. Started as a program, `python -m tests.servers.kubernetes.binaries`, it
builds what is not cached. That needs a network, which the tests of a cluster do not have: they only
unpack, and `tests.run` builds before (`background`).

`TEST_KUBERNETES_GO` names a directory where modules and build cache are kept, which makes the next
build quick.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.missing import missing
from tests.servers.kubernetes import toolchain

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = Path(__file__).parent / "go"
PROGRAMS = {"hyperkube": ".", "pause": "./pause"}
KEEP = "TEST_KUBERNETES_GO"
ERROR = "TEST_KUBERNETES_ERROR"
"""Environment variable with the reason why there is no build."""
MAX_ATTEMPTS = 2
"""Of each program: one of hundreds of downloads may fail."""
MAX_LOG = 2000
"""Characters of a failed build's log in the error message."""
_UNTIL_KILLED = ("setpriv", "--pdeathsig", "KILL")
_NOT_BUILT = (
    "not in the cache. Run `make test-kubernetes` or `python -m tests.run tests/kubernetes`"
)
_VERSION_PACKAGES = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")


class BuildFailed(Exception):
    """The message says what is missing."""


class Binaries(NamedTuple):
    hyperkube: Path
    """etcd, the components of Kubernetes and kubectl: its first argument is the component."""
    pause: Path


def cached() -> bool:
    return all(_archive(_place(), name).exists() for name in PROGRAMS)


def build() -> Path:
    """Build what is not cached; concurrent calls build once. Returns the directory in the cache."""
    place = _place()
    place.mkdir(parents=True, exist_ok=True)
    with (place.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not cached():
            with _work_directory(place.parent) as work:
                _build(work, place)
    return place


def unpack(directory: Path) -> Binaries:
    """The programs, unpacked in `directory`. Skips the test when they are not built."""
    if not cached():
        missing(f"Kubernetes is not built: {os.environ.get(ERROR, _NOT_BUILT)}")
    place = _place()
    unpacked = Binaries(*(directory / name for name in PROGRAMS))
    for path in unpacked:
        with gzip.open(_archive(place, path.name)) as packed, path.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
        path.chmod(0o755)
    return unpacked


def version() -> str:
    """Of Kubernetes, such as v1.34.4."""
    found = re.search(r"k8s\.io/kubernetes (v\S+)", (SOURCES / "go.mod").read_text())
    assert found is not None
    return found[1]


def flags() -> list[str]:
    """What Kubernetes' own build sets: without a version a kubelet does not start."""
    major, minor, _ = version().removeprefix("v").split(".")
    facts = {
        "gitVersion": version(),
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "buildDate": "1970-01-01T00:00:00Z",
    }
    words = [f"-X {package}.{key}={facts[key]}" for package in _VERSION_PACKAGES for key in facts]
    return ["-trimpath", "-ldflags", " ".join(["-s", "-w", *words])]


def _place() -> Path:
    """The directory in the cache for these sources, flags and toolchain."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.*")):
        digest.update(path.read_bytes())
    for word in (*flags(), toolchain.version(SOURCES), platform.machine()):
        digest.update(word.encode())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "atoll-tests" / "kubernetes" / digest.hexdigest()[:16]


def _archive(place: Path, name: str) -> Path:
    return place / f"{name}.gz"


@contextmanager
def _work_directory(beside: Path) -> Iterator[Path]:
    kept = os.environ.get(KEEP)
    if kept:
        yield Path(kept)
        return
    for killed in beside.glob("build-*"):
        _remove(killed)
    work = Path(tempfile.mkdtemp(prefix="build-", dir=beside))
    try:
        yield work
    finally:
        _remove(work)


def _remove(work: Path) -> None:
    # Modules are read-only, also for their owner.
    subprocess.run(["chmod", "-R", "u+w", str(work)], stderr=subprocess.DEVNULL, check=False)
    # A compiler of a killed build may still write there; the next build removes the rest.
    shutil.rmtree(work, ignore_errors=True)


def _build(work: Path, place: Path) -> None:
    try:
        go = toolchain.program(SOURCES, work)
    except toolchain.NoGo as error:
        raise BuildFailed(str(error)) from error
    temporary, out = work / "tmp", work / "bin"
    for directory in (temporary, out):
        directory.mkdir(parents=True, exist_ok=True)
    env = {
        **os.environ,
        "GOMODCACHE": str(work / "gomod"),
        "GOCACHE": str(work / "gocache"),
        # A killed build leaves gigabytes there.
        "GOTMPDIR": str(temporary),
        "GOFLAGS": "-buildvcs=false",
        "CGO_ENABLED": "0",
        # A build of programs, whatever an editor's settings are.
        "GOWORK": "off",
    }
    for name, package in PROGRAMS.items():
        _compile(go, package, out / name, env)
        part = place / f"{name}.part"
        with (out / name).open("rb") as file, gzip.open(part, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(file, packed, 1 << 20)
        part.rename(_archive(place, name))


def _compile(go: str, package: str, program: Path, env: dict[str, str]) -> None:
    for _ in range(MAX_ATTEMPTS):
        done = subprocess.run(
            [*_UNTIL_KILLED, go, "build", *flags(), "-o", str(program), package],
            cwd=SOURCES,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return
    raise BuildFailed(f"{go} ended with {done.returncode}:\n{done.stdout[-MAX_LOG:]}")


def _terminate(number: int, frame: object) -> None:
    """End the compilers too, and remove the work directory."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.getpgrp() == os.getpid():
        with suppress(ProcessLookupError):
            os.killpg(0, signal.SIGTERM)
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    try:
        build()
    except BuildFailed as failed:
        sys.exit(str(failed))
