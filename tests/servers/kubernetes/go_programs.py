"""
Programs that are built from Go modules, once, and cached compressed.

The modules and the build cache of Go, some GB, are removed after a build. `TEST_KUBERNETES_GO`
names a directory where they are kept, which makes the next build quick.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.missing import missing
from tests.servers.kubernetes import toolchain

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


class BuildFailed(Exception):
    """The message says what is missing."""


@dataclass(frozen=True)
class GoPrograms:
    name: str
    sources: Path
    """With go.mod."""
    packages: Mapping[str, str]
    """What is built, by the names of the programs."""
    flags: tuple[str, ...]
    """Of `go build`."""

    def cached(self) -> bool:
        return all(_archive(self._place, name).exists() for name in self.packages)

    def build(self) -> None:
        """Build what is not cached; concurrent calls build once."""
        place = self._place
        place.mkdir(parents=True, exist_ok=True)
        with (place.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not self.cached():
                with _work_directory(place.parent) as work:
                    self._build(work, place)

    def unpack(self, directory: Path) -> dict[str, Path]:
        """The programs, unpacked in `directory`. Skips the test when they are not built."""
        if not self.cached():
            missing(f"{self.name} is not built: {os.environ.get(ERROR, _NOT_BUILT)}")
        unpacked = {name: directory / name for name in self.packages}
        for name, path in unpacked.items():
            with gzip.open(_archive(self._place, name)) as packed, path.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
            path.chmod(0o755)
        return unpacked

    @property
    def _place(self) -> Path:
        """The directory in the cache for these sources, flags and toolchain."""
        digest = hashlib.sha256()
        for path in sorted(self.sources.rglob("*.*")):
            digest.update(path.read_bytes())
        for word in (*self.flags, toolchain.version(self.sources), platform.machine()):
            digest.update(word.encode())
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return home / "atoll-tests" / self.name.lower() / digest.hexdigest()[:16]

    def _build(self, work: Path, place: Path) -> None:
        try:
            go = toolchain.program(self.sources, work)
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
        for name, package in self.packages.items():
            self._compile(go, package, out / name, env)
            part = place / f"{name}.part"
            with (out / name).open("rb") as file, gzip.open(part, "wb", compresslevel=6) as packed:
                shutil.copyfileobj(file, packed, 1 << 20)
            part.rename(_archive(place, name))

    def _compile(self, go: str, package: str, program: Path, env: dict[str, str]) -> None:
        for _ in range(MAX_ATTEMPTS):
            done = subprocess.run(
                [*_UNTIL_KILLED, go, "build", *self.flags, "-o", str(program), package],
                cwd=self.sources,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if done.returncode == 0:
                return
        raise BuildFailed(f"{go} ended with {done.returncode}:\n{done.stdout[-MAX_LOG:]}")


def linked(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Flags that set variables of packages, by their paths and names."""
    words = [f"-X {path}={value}" for path, value in variables.items()]
    return "-trimpath", "-ldflags", " ".join(["-s", "-w", *words])


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
