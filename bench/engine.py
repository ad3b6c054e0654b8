"""
A Docker engine of the benchmark's own, with one container that sleeps, to copy files into.

Its data lies in the directory that is given, so that the copies are on the same disk as the others.
It has no network, and ends with the benchmark. `Unavailable` says why there is none.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Self

START_SECONDS = 60
STOP_SECONDS = 60


class Unavailable(Exception):
    """Why there is no engine."""


class Engine:
    def __init__(self, place: Path) -> None:
        self._place = place
        # The path of a socket is limited to 107 bytes.
        self._run = Path(tempfile.mkdtemp(prefix="atoll-d-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.container = ""

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            if self.container:
                subprocess.run(self._docker("rm", "--force", self.container), capture_output=True)
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self._run, ignore_errors=True)
        shutil.rmtree(self._place / "docker", ignore_errors=True)

    def copy(self, source: str, target: str) -> None:
        """`docker cp`; what lies in the container begins with a colon."""
        given = [self.container + each if each[0] == ":" else each for each in (source, target)]
        self._call("cp", "--quiet", *given)

    def forget(self, path: str) -> None:
        """Not timed: what was copied goes, so that each copy makes new files."""
        self._call("exec", self.container, "/bin/rm", "-rf", path)

    def _start(self) -> None:
        if os.geteuid() != 0:
            raise Unavailable("a Docker engine needs root")
        if missing := [name for name in ("dockerd", "docker") if shutil.which(name) is None]:
            raise Unavailable(f"{missing[0]} is not installed")
        log = self._run / "log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [
                    "dockerd", f"--host={self._host}", f"--data-root={self._place / 'docker'}",
                    f"--exec-root={self._run / 'exec'}", f"--pidfile={self._run / 'pid'}",
                    "--bridge=none", "--iptables=false", "--ip6tables=false",
                ],
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while subprocess.run(self._docker("version"), capture_output=True).returncode:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise Unavailable(f"dockerd does not start: {_last_line(log)}")
            time.sleep(0.1)
        image = self._run / "image.tar"
        _pack(image, ("sleep", "rm"))
        self._call("import", str(image), "bench:latest")
        self.container = self._call(
            "run", "--detach", "--network=none", "bench:latest", "/bin/sleep", "86400"
        )

    @property
    def _host(self) -> str:
        return f"unix://{self._run / 'sock'}"

    def _docker(self, *command: str) -> list[str]:
        return ["docker", f"--host={self._host}", *command]

    def _call(self, *command: str) -> str:
        done = subprocess.run(self._docker(*command), capture_output=True, text=True)
        if done.returncode:
            raise Unavailable(f"docker {command[0]}: {done.stderr.strip()[-300:]}")
        return done.stdout.strip()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "it says nothing"


def _pack(image: Path, programs: tuple[str, ...]) -> None:
    """A root file system of these programs of this machine and what they are linked with."""
    with tarfile.open(image, "w", dereference=True) as archive:
        wanted: set[str] = set()
        for name in programs:
            found = shutil.which(name)
            if found is None:
                raise Unavailable(f"{name} is not installed")
            archive.add(found, f"bin/{name}")
            told = subprocess.run(["ldd", found], capture_output=True, text=True)
            wanted |= {word for word in told.stdout.split() if word.startswith("/")}
        for each in sorted(wanted):
            archive.add(each, each.lstrip("/"))
