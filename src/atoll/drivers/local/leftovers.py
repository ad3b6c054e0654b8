"""What a data directory that was removed has left on this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from atoll import ids
from atoll.drivers.local.sandbox_start import OWNER
from atoll.drivers.shared import cgroups, processes
from atoll.drivers.shared.mount_points import mount_points, unmount
from atoll.errors import TemporaryError
from atoll.executor.processes import children_of

if TYPE_CHECKING:
    from atoll.settings import LocalSettings

END_SECONDS = 5.0
"""For processes to end that were killed."""


def count(settings: LocalSettings, node: Path) -> int:
    """How many instances of the node directory `node` there are, running or not."""
    groups = cgroups.node_groups(settings, node)
    found = sum(ids.is_instance_id(name) for name in groups.names())
    groups.close()
    return max(found, len(_bubblewraps(node.parent)))


def remove(settings: LocalSettings, node: Path) -> None:
    """
    End all instances of the node directory and remove their control groups and mounts. Raises
    `TemporaryError` when something does not end.
    """
    groups = cgroups.node_groups(settings, node)
    for name in groups.names():
        if not cgroups.kill_and_remove(groups, name, END_SECONDS):
            raise TemporaryError(f"Processes of {name} do not end.", code="instance_stuck")
    groups.close()
    # Where there are no control groups, processes are all that is left.
    for pid in _bubblewraps(node.parent):
        for process in (*children_of(pid), pid):
            started = processes.start_time(process)
            if started is not None:
                processes.kill(process, started)
    deadline = time.monotonic() + END_SECONDS
    while _bubblewraps(node.parent):
        if time.monotonic() > deadline:
            raise TemporaryError(f"Processes of {node.parent} do not end.", code="instance_stuck")
        time.sleep(0.01)
    if node.is_dir():
        for path in mount_points(node):
            unmount(Path(path))


def _bubblewraps(data_dir: Path) -> list[int]:
    """Pids of the bubblewraps of a data directory, as far as this user may see them."""
    mark = f"{OWNER}={data_dir}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                environment = Path(entry.path, "environ").read_bytes()
            except OSError:
                continue  # It has ended, or belongs to somebody else.
            if mark in environment.split(b"\0"):
                found.append(int(entry.name))
    return found
