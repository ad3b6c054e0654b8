"""
Instances, control groups and mounts that servers have left: of a data directory that was removed,
or of an embedded server that has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from atoll import ids
from atoll.drivers.local.sandbox_start import OWNER
from atoll.drivers.shared import cgroups, processes
from atoll.drivers.shared.mount_points import unmount_all
from atoll.drivers.shared.volumes.bucket_mounts import GROUP
from atoll.errors import TemporaryError
from atoll.executor.processes import children_of

if TYPE_CHECKING:
    from atoll.settings import LocalSettings

KILL_TIMEOUT = 5.0
"""Seconds that killed processes may take to end."""


def count(settings: LocalSettings, node: Path) -> int:
    """Number of instances of a node directory, running or not."""
    groups = cgroups.node_groups(settings, node)
    found = sum(ids.is_instance_id(name) for name in groups.names())
    groups.close()
    return max(found, len(_main_processes(node.parent)))


def remove(settings: LocalSettings, node: Path) -> None:
    """
    Kill all instances of a node directory and remove their control groups and mounts. Raises
    `TemporaryError` if a process does not end.
    """
    groups = cgroups.node_groups(settings, node)
    for name in groups.names():
        if not cgroups.kill_and_remove(groups, name, KILL_TIMEOUT):
            raise TemporaryError(f"Processes of {name} do not end.", code="instance_stuck")
    groups.close()
    # Without control groups, instances are found by their processes.
    for pid in _main_processes(node.parent):
        for process in (*children_of(pid), pid):
            started = processes.start_time(process)
            if started is not None:
                processes.kill(process, started)
    deadline = time.monotonic() + KILL_TIMEOUT
    while _main_processes(node.parent):
        if time.monotonic() > deadline:
            raise TemporaryError(f"Processes of {node.parent} do not end.", code="instance_stuck")
        time.sleep(0.01)
    if node.is_dir():
        unmount_all(node)


def owner_mark(data_dir: Path) -> str:
    """Identifies a data directory to processes that may not know its path."""
    return hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:32]


def remove_groups(settings: LocalSettings, node: Path) -> None:
    """Remove the control groups of a node directory whose server has ended."""
    groups = cgroups.node_groups(settings, node)
    for name in groups.names():
        with contextlib.suppress(cgroups.GroupBusy):
            if groups.frozen(name) or name.startswith(GROUP):
                # Ephemeral instances end with their server, unless they are frozen; s3fs outlives
                # it.
                cgroups.kill_and_remove(groups, name, KILL_TIMEOUT)
            groups.remove(name)
    groups.close()


def _main_processes(data_dir: Path) -> list[int]:
    """
    Pids of the instances' main processes of a data directory, as far as this user may see them.
    """
    mark = f"{OWNER}={owner_mark(data_dir)}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                environment = Path(entry.path, "environ").read_bytes()
            except OSError:
                continue  # It has ended, or belongs to another user.
            if mark in environment.split(b"\0") and _is_main(int(entry.name)):
                found.append(int(entry.name))
    return found


def _is_main(pid: int) -> bool:
    """Whether this is bubblewrap, or PID 1 of an instance that is a fork."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return False
    number = processes.namespace_pid(pid)
    # User code can choose its name, but has another pid inside.
    return number == 1 or (name == "bwrap" and number == pid)
