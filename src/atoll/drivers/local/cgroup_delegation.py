"""
A delegated control group for a server that an ordinary user starts.

In version 2 the group of a login session belongs to root, so Atoll cannot set limits there. The
user's systemd can move a running process to a new scope below its own group, which belongs to the
user. `cgroups.find` then takes the highest delegated group, that of the user's systemd, as it does
for `systemd-run --user --scope -p Delegate=yes atoll serve`. It is the same group for every server
of a data directory, so a server that starts later finds the instances. `Delegate` makes systemd
enable all controllers on the path to the scope.

systemd is called through busctl, because `systemd-run` would replace this process, and its failure
would be the server's. `acquire` never raises: without the group, the server has weaker limits.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import socket
import struct
import subprocess
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.shared import cgroups
from atoll.drivers.shared.cgroups.files import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.settings import LocalSettings

log = structlog.get_logger(__name__)

TIMEOUT = 5.0
"""Seconds for systemd to answer, and to move the process."""
BUSCTL = "busctl"
CREDENTIALS = struct.Struct("3i")
"""What SO_PEERCRED gives: pid, uid, gid."""
LINGERING = Path("/var/lib/systemd/linger")
"""Has a file for each user whose systemd runs without a login."""


SERVICE_FIX = "set Delegate=yes and DelegateSubgroup=server in the unit, if it is the server's own"


class Decision(StrEnum):
    ASK = "ask"
    ROOT = "root"
    """Root may use every group."""
    VERSION_ONE = "version_one"
    """Version 1 cannot be delegated safely, and systemd does not do it."""
    DELEGATED = "delegated"
    """The process is in a delegated group: a new scope would have the same controllers."""
    SERVICE = "service"
    """The process belongs to a service, whose limits and accounting it would leave."""


@dataclass(frozen=True)
class Situation:
    """Everything that decides whether systemd is asked."""

    uid: int
    unified: bool
    provides: frozenset[str]
    """Names of `template.REQUIREMENTS` that the present groups provide."""
    own: str
    """The text of /proc/self/cgroup."""


def decide(found: Situation) -> Decision:
    if found.uid == 0:
        return Decision.ROOT
    if not found.unified:
        return Decision.VERSION_ONE
    if found.provides:
        return Decision.DELEGATED
    parts = cgroups.own_path(found.own).split("/")
    if any(part.endswith(".service") and not part.startswith("user@") for part in parts):
        return Decision.SERVICE
    return Decision.ASK


def request(unit: str, pid: int, timeout: float) -> Sequence[str]:
    """Arguments of busctl that ask for a delegated scope with this process in it."""
    properties = (
        ("Description", "s", "Atoll server"),
        ("PIDs", "au", "1", str(pid)),
        ("Delegate", "b", "true"),
        # Remove the unit when it is empty, even after a failure.
        ("CollectMode", "s", "inactive-or-failed"),
    )
    arguments = [word for each in properties for word in each]
    return (
        "--user",
        f"--timeout={timeout:g}",
        "call",
        "org.freedesktop.systemd1",
        "/org/freedesktop/systemd1",
        "org.freedesktop.systemd1.Manager",
        "StartTransientUnit",
        "ssa(sv)a(sa(sv))",
        unit,
        "fail",
        str(len(properties)),
        *arguments,
        "0",
    )


@dataclass(frozen=True)
class Process:
    """A process, as the kernel and the user's systemd know it."""

    uid: int
    pid: int
    runtime: Path
    """XDG_RUNTIME_DIR, where the user's bus is."""
    group: Path = cgroups.OWN_GROUP
    """The file with its control group."""
    lingers: bool = True
    """Whether the user's systemd, with all that it has started, outlives the last logout."""

    @classmethod
    def current(cls) -> Process:
        uid = os.geteuid()
        runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
        return cls(uid, os.getpid(), Path(runtime), lingers=lingers(uid))

    @property
    def bus(self) -> Path:
        return self.runtime / "bus"


class NotDelegated(Exception):
    """The message is the reason."""


def situation(settings: LocalSettings, node: Path, process: Process) -> Situation:
    """Finding the groups of a node may make one, which the driver needs anyway."""
    own = process.group.read_text()
    unified = (settings.cgroup_root / "cgroup.controllers").exists()
    if process.uid == 0 or not unified:
        return Situation(process.uid, unified, frozenset(), own)
    groups = cgroups.node_groups(settings, node, own)
    return Situation(process.uid, unified, groups.provides, own)


def check_systemd(process: Process) -> str:
    """Path of busctl; raises `NotDelegated` if the user's systemd cannot be used."""
    busctl = shutil.which(BUSCTL)
    if busctl is None:
        raise NotDelegated(f"{BUSCTL} is not on the PATH")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bus:
            bus.settimeout(TIMEOUT)
            bus.connect(str(process.bus))
            known = bus.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            peer, _, _ = CREDENTIALS.unpack(known)
    except OSError as error:
        raise NotDelegated(f"no systemd of this user at {process.bus}: {error}") from error
    if peer == 0:
        # Our pid would denote another process there.
        raise NotDelegated("the user's systemd is in another PID namespace")
    if not process.lingers:
        raise NotDelegated(
            "your systemd would end the server and its sessions at your last logout; to prevent "
            "that, run: loginctl enable-linger"
        )
    return busctl


def possible(
    settings: LocalSettings, process: Process | None = None
) -> tuple[Decision, str | None]:
    """
    Whether a server that starts here would ask systemd, and the reason why it cannot.
    """
    process = process or Process.current()
    # A group for this check alone, which is removed again.
    decision = decide(situation(settings, Path(), process))
    cgroups.node_groups(settings, Path(), process.group.read_text()).close()
    if decision is not Decision.ASK:
        return decision, None
    if not settings.delegation:
        return decision, "it is switched off by ATOLL_LOCAL__DELEGATION"
    try:
        check_systemd(process)
    except NotDelegated as error:
        return decision, str(error)
    return decision, None


def acquire(settings: LocalSettings, node: Path, process: Process | None = None) -> None:
    """
    Move this process to a group in which instances can be limited, if systemd provides one.

    Call it before the server has threads, children or a driver; workers inherit the group.
    """
    process = process or Process.current()
    if not settings.delegation:
        return
    started = time.monotonic()
    try:
        decision = decide(situation(settings, node, process))
        if decision is Decision.SERVICE:
            raise NotDelegated(f"the server belongs to a service: {SERVICE_FIX}")
        if decision is not Decision.ASK:
            return
        unit = _enter_scope(process)
        provides = _settle(settings, node, process)
    except (NotDelegated, OSError) as error:
        log.warning("cgroups.not_delegated", reason=str(error), effect="limits are weaker")
        return
    log.info(
        "cgroups.delegated",
        unit=unit,
        provides=sorted(provides),
        took_ms=round((time.monotonic() - started) * 1000),
    )


def lingers(uid: int) -> bool:
    """Whether the user's systemd outlives the user's last logout."""
    try:
        return (LINGERING / pwd.getpwuid(uid).pw_name).exists()
    except (KeyError, OSError):
        return False


def _enter_scope(process: Process) -> str:
    busctl = check_systemd(process)
    unit = f"atoll-{process.pid}-{secrets.token_hex(4)}.scope"
    deadline = time.monotonic() + TIMEOUT
    # Not the server's environment: it has secrets, and may name another bus.
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "XDG_RUNTIME_DIR": str(process.runtime),
        "DBUS_SESSION_BUS_ADDRESS": f"unix:path={process.bus}",
    }
    try:
        done = subprocess.run(
            [busctl, *request(unit, process.pid, TIMEOUT)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
            check=False,
            cwd="/",
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise NotDelegated(f"systemd did not answer within {TIMEOUT:g} s") from None
    if done.returncode != 0:
        raise NotDelegated(done.stderr.strip()[-300:] or f"{BUSCTL} exited with {done.returncode}")

    def moved() -> bool:
        return unit in cgroups.own_path(process.group.read_text()).split("/")

    # The answer comes when the job is queued.
    if not wait_until(moved, deadline - time.monotonic()):
        raise NotDelegated(f"systemd did not move the server to {unit} within {TIMEOUT:g} s")
    return unit


def _settle(settings: LocalSettings, node: Path, process: Process) -> frozenset[str]:
    found = situation(settings, node, process)
    if not found.provides:
        # Only the scope was delegated, and controllers cannot be enabled in the server's own group.
        cgroups.enter_leaf(settings.cgroup_root, found.own, process.pid)
        found = situation(settings, node, process)
    if not found.provides:
        raise NotDelegated(f"no controller can be used in {cgroups.own_path(found.own)}")
    return found.provides
