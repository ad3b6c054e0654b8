"""A server asks the user's systemd, here a program and a tree of files, for a control group."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from atoll.drivers.local import cgroup_delegation
from atoll.drivers.local.cgroup_delegation import Decision, Process
from atoll.settings import LocalSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

SESSION = "user.slice/user-1000.slice/session-3.scope"
MANAGER = "user.slice/user-1000.slice/user@1000.service"
PID = 4242
MOVES = """\
#!/bin/sh
# The unit is the word after the signature.
printf '%s\\n' "$@" > {asked}
env > {asked}.env
while [ "$1" != 'ssa(sv)a(sa(sv))' ]; do shift; done
mkdir -p {manager}/app.slice/$2
echo 0::/user.slice/user-1000.slice/user@1000.service/app.slice/$2 > {group}
"""
REFUSES = """\
#!/bin/sh
echo 'Call failed: Access denied' >&2
exit 1
"""
IGNORES = """\
#!/bin/sh
exit 0
"""
HANGS = """\
#!/bin/sh
exec sleep 60
"""


class Machine:
    """One with version 2, and a login session of an ordinary user."""

    def __init__(self, tmp_path: Path, runtime: Path) -> None:
        self.root = tmp_path / "cgroup"
        self.asked = tmp_path / "asked"
        self.bin = tmp_path / "bin"
        self.bin.mkdir()
        for place in ("", SESSION, MANAGER):
            (self.root / place).mkdir(parents=True, exist_ok=True)
            (self.root / place / "cgroup.controllers").write_text("cpu memory pids")
        # No other group can be written to: these files are missing there.
        for name in ("cgroup.subtree_control", "cgroup.procs"):
            (self.root / MANAGER / name).touch()
        self.group = tmp_path / "group"
        self.group.write_text(f"0::/{SESSION}\n")
        self.process = Process(1000, PID, runtime, self.group)
        self.settings = LocalSettings(cgroup_root=self.root)
        self.node = tmp_path / "node"

    def busctl(self, script: str) -> None:
        program = self.bin / "busctl"
        words = {"asked": self.asked, "manager": self.root / MANAGER, "group": self.group}
        program.write_text(script.format(**words))
        program.chmod(0o755)

    def acquire(self) -> list[Any]:
        with capture_logs() as events:
            cgroup_delegation.acquire(self.settings, self.node, self.process)
        return list(events)


@contextmanager
def bus() -> Iterator[Path]:
    """A runtime directory in which something listens; a socket's path must be short."""
    with tempfile.TemporaryDirectory() as runtime, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{runtime}/bus")
        listener.listen()
        yield Path(runtime)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with bus() as runtime:
        machine = Machine(tmp_path, runtime)
        monkeypatch.setenv("PATH", f"{machine.bin}:{os.environ['PATH']}")
        monkeypatch.setenv("ATOLL_API_KEY", "a key of this server")
        yield machine


def test_a_server_in_a_login_session_gets_a_delegated_group(machine: Machine) -> None:
    machine.busctl(MOVES)
    warnings = [event for event in machine.acquire() if event["log_level"] == "warning"]
    assert warnings == []
    words = machine.asked.read_text().split()
    assert any(re.fullmatch(rf"atoll-{PID}-[0-9a-f]+\.scope", word) for word in words)
    assert "StartTransientUnit" in words
    assert str(PID) in words
    enabled = (machine.root / MANAGER / "cgroup.subtree_control").read_text()
    assert enabled == "+cpu +memory +pids"


def test_systemd_is_called_on_the_user_s_bus_without_secrets(machine: Machine) -> None:
    machine.busctl(MOVES)
    machine.acquire()
    given = machine.asked.with_name("asked.env").read_text()
    assert f"DBUS_SESSION_BUS_ADDRESS=unix:path={machine.process.bus}" in given
    assert "a key of this server" not in given


def test_a_server_in_a_delegated_group_does_not_request_one(machine: Machine) -> None:
    machine.busctl(MOVES)
    machine.acquire()
    machine.asked.unlink()
    assert machine.acquire() == []
    assert not machine.asked.exists()


def test_a_setting_disables_the_request(machine: Machine) -> None:
    machine.busctl(MOVES)
    machine.settings = LocalSettings(cgroup_root=machine.root, delegation=False)
    assert machine.acquire() == []
    assert not machine.asked.exists()
    found = cgroup_delegation.possible(machine.settings, machine.process)
    assert found[0] is Decision.ASK
    assert "ATOLL_LOCAL__DELEGATION" in (found[1] or "")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param(REFUSES, "Call failed: Access denied", id="refused"),
        pytest.param(IGNORES, "did not move", id="not moved"),
        pytest.param(HANGS, "did not answer", id="silent"),
    ],
)
def test_a_systemd_that_does_not_help_is_logged_in_bounded_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    monkeypatch.setattr(cgroup_delegation, "TIMEOUT", 0.5)
    machine.busctl(script)
    (event,) = machine.acquire()
    assert event["event"] == "cgroups.not_delegated"
    assert event["log_level"] == "warning"
    assert reason in event["reason"]


def test_a_scope_without_controllers_is_reported(machine: Machine) -> None:
    machine.busctl(MOVES)
    (machine.root / MANAGER / "cgroup.controllers").write_text("cpuset io")
    (event,) = machine.acquire()
    assert event["event"] == "cgroups.not_delegated"
    assert "no controller can be used in" in event["reason"]


def test_a_user_without_systemd_is_reported(machine: Machine) -> None:
    machine.busctl(MOVES)
    machine.process.bus.unlink()
    (event,) = machine.acquire()
    assert f"no systemd of this user at {machine.process.bus}" in event["reason"]
    assert not machine.asked.exists()


def test_a_systemd_that_ends_at_the_last_logout_is_not_used(machine: Machine) -> None:
    machine.busctl(MOVES)
    machine.process = replace(machine.process, lingers=False)
    (event,) = machine.acquire()
    assert event["event"] == "cgroups.not_delegated"
    assert "loginctl enable-linger" in event["reason"]
    assert not machine.asked.exists()


def test_a_machine_without_busctl_is_reported(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(machine.bin))
    (event,) = machine.acquire()
    assert event["reason"] == "busctl is not on the PATH"


def test_a_service_stays_in_its_group(machine: Machine) -> None:
    machine.busctl(MOVES)
    machine.group.write_text("0::/system.slice/atoll.service\n")
    (event,) = machine.acquire()
    assert "Delegate=yes" in event["reason"]
    assert not machine.asked.exists()


def test_the_real_busctl_accepts_the_request() -> None:
    """It checks the arguments against the signature before it sends them."""
    for program in ("busctl", "dbus-daemon"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:path={directory}/bus"
        daemon = subprocess.Popen(
            ["dbus-daemon", "--session", "--nofork", f"--address={address}", "--print-address"],
            stdout=subprocess.PIPE,
        )
        with daemon:
            try:
                assert daemon.stdout is not None
                if not daemon.stdout.readline():
                    pytest.skip("no message bus can be started here")
                done = subprocess.run(
                    ["busctl", *cgroup_delegation.request("atoll-1-ab.scope", 1, 5.0)],
                    env={**os.environ, "DBUS_SESSION_BUS_ADDRESS": address},
                    capture_output=True,
                    text=True,
                    timeout=60,
                )
            finally:
                daemon.terminate()
    # Sent, and refused by a bus without systemd. Wrong arguments have other messages.
    assert re.match(r"Call failed: .*org\.freedesktop\.systemd1", done.stderr), done.stderr
