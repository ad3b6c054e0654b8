"""How the programs of the tests' cluster are built, with a small program in place of Go."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.api import eventually
from tests.missing import REQUIRED
from tests.servers.kubernetes import background, binaries, go_programs, toolchain

TOP = Path(__file__).parents[3]
PACKAGES = [".", "helm.sh/helm/v3/cmd/helm"]
BUILD = (sys.executable, "-m", binaries.__name__)
# Each build adds its arguments to a log. It waits for the end of a FIFO, if there is one.
GO = """#!/bin/sh
set -eu
if [ "$1" = env ]; then echo go1.99.0; exit; fi
echo "$*" >> "$FAKE/log"
if [ -e "$FAKE/fail" ]; then seq 1 5000; echo "no space left on device"; exit 1; fi
echo half > "$GOTMPDIR/half"
echo $$ > "$FAKE/pid"
if [ -e "$FAKE/begun" ]; then echo > "$FAKE/begun"; cat "$FAKE/gate"; fi
while [ "$1" != -o ]; do shift; done
echo "$3 by Go" > "$2"
"""


class FakeGo:
    def __init__(self, place: Path, cache: Path) -> None:
        self.place = place
        self.cache = cache / "atoll-tests"

    def hold(self) -> None:
        """Builds wait for `release`."""
        os.mkfifo(self.place / "begun")
        os.mkfifo(self.place / "gate")

    def wait_for_build(self) -> int:
        """The pid of one that has begun."""
        with (self.place / "begun").open() as begun:
            begun.read()
        return int((self.place / "pid").read_text())

    def release(self) -> None:
        (self.place / "begun").unlink()
        (self.place / "gate").write_text("")

    def fail(self) -> None:
        (self.place / "fail").touch()

    @property
    def builds(self) -> list[str]:
        """The packages that were built."""
        log = self.place / "log"
        return [line.split()[-1] for line in log.read_text().splitlines()] if log.exists() else []

    def leftovers(self) -> list[str]:
        """What is in the cache beside the locks and the archives of one build."""
        archives = {f"{name}.gz" for name in ("hyperkube", "helm")}
        files = [path for path in self.cache.rglob("*") if not path.is_dir()]
        directories = [path.name for path in self.cache.glob("*/build-*")]
        return directories + [path.name for path in files if path.name not in {*archives, "lock"}]


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGo]:
    place = tmp_path / "fake"
    place.mkdir()
    program = place / "go"
    program.write_text(GO)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(place), prepend=os.pathsep)
    monkeypatch.setenv("FAKE", str(place))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (go_programs.KEEP, go_programs.ERROR, REQUIRED):
        monkeypatch.delenv(name, raising=False)
    toolchain.version.cache_clear()
    yield FakeGo(place, tmp_path / "cache")
    toolchain.version.cache_clear()


def wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(descriptor):
        assert select.select([descriptor], [], [], 10)[0], f"process {pid} is left"


def test_a_build_runs_beside_other_tests_until_its_result_is_needed(
    go: FakeGo, tmp_path: Path
) -> None:
    go.hold()
    with background.building() as finish:
        go.wait_for_build()
        assert not binaries.cached()
        go.release()
        finish()
        assert binaries.cached()
    unpacked = binaries.unpack(tmp_path)
    assert unpacked.read_text() == ". by Go\n"
    assert os.access(unpacked, os.X_OK)
    with background.building() as finish:
        finish()
    assert go.builds == PACKAGES
    assert go.leftovers() == []


def test_concurrent_builds_build_once(go: FakeGo) -> None:
    go.hold()
    first = subprocess.Popen(BUILD, cwd=TOP)
    go.wait_for_build()
    second = subprocess.Popen(BUILD, cwd=TOP)
    eventually(lambda: f" {second.pid} " in Path("/proc/locks").read_text())
    go.release()
    assert (first.wait(30), second.wait(30)) == (0, 0)
    assert go.builds == PACKAGES


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_build_does_not_disturb_the_next_one(go: FakeGo, number: signal.Signals) -> None:
    go.hold()
    killed = subprocess.Popen(BUILD, cwd=TOP)
    compiler = go.wait_for_build()
    killed.send_signal(number)
    killed.wait(30)
    wait_for_end(compiler)
    assert bool(go.leftovers()) == (number == signal.SIGKILL)
    # Nobody waits for the gate.
    for name in ("begun", "gate"):
        (go.place / name).unlink()
    subprocess.run(BUILD, cwd=TOP, check=True)
    assert binaries.cached()
    assert go.leftovers() == []


def test_the_end_of_the_tests_is_the_end_of_a_build(go: FakeGo) -> None:
    go.hold()
    with background.building():
        compiler = go.wait_for_build()
    wait_for_end(compiler)
    assert not binaries.cached()
    assert go.leftovers() == []


def test_a_failure_is_reported_with_the_end_of_the_log(
    go: FakeGo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # To be removed after the test.
    monkeypatch.setenv(go_programs.ERROR, "")
    go.fail()
    with background.building() as finish:
        finish()
    shown = capsys.readouterr().out
    assert "Kubernetes cannot be built: " in shown
    assert "no space left on device" in shown
    assert len(shown) < 2 * go_programs.MAX_LOG
    assert go.builds == ["."] * go_programs.MAX_ATTEMPTS
    with pytest.raises(pytest.skip.Exception, match="no space left on device"):
        binaries.unpack(tmp_path)
    monkeypatch.setenv(REQUIRED, "1")
    with pytest.raises(pytest.fail.Exception, match="no space left on device"):
        binaries.unpack(tmp_path)
    assert len(go.builds) == go_programs.MAX_ATTEMPTS, "the tests must not build again"


def test_a_build_that_is_killed_is_a_failure_with_a_reason(
    go: FakeGo, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(go_programs.ERROR, "")
    go.hold()
    with background.building() as finish:
        compiler = go.wait_for_build()
        stat = Path(f"/proc/{compiler}/stat").read_text()
        os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
        finish()
    assert "SIGKILL ended the build" in capsys.readouterr().out


def test_tests_without_a_build_say_how_to_get_one(go: FakeGo, tmp_path: Path) -> None:
    with pytest.raises(pytest.skip.Exception, match="make test-kubernetes"):
        binaries.unpack(tmp_path)
    assert go.builds == []
