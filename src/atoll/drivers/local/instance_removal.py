"""Kills instances and removes what belongs to them. Blocking; callers use a thread."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

import structlog

from atoll import ids
from atoll.drivers.shared import cgroups, processes
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from atoll.drivers.local.handle_files import HandleFiles
    from atoll.drivers.shared.volumes.node_volumes import NodeVolumes
    from atoll.model.instance import Handle

KILL_TIMEOUT = 10.0
FREEZE_CHECK_INTERVAL = 0.02
"""Seconds between two checks whether an instance that is being killed was frozen."""

log = structlog.get_logger(__name__)


class InstanceRemoval:
    def __init__(
        self, groups: cgroups.ControlGroups, handles: HandleFiles, volumes: NodeVolumes
    ) -> None:
        self._groups = groups
        self._handles = handles
        self._volumes = volumes

    def kill(self, handle: Handle) -> None:
        """Kill the instance: with its PID 1 the kernel ends every process of the PID namespace."""
        data = handle.data
        if data["boot"] != processes.boot_id():
            return
        deadline = time.monotonic() + KILL_TIMEOUT
        both = [
            (int(data[pid]), int(data[started]))
            for pid, started in (("child", "child_started"), ("pid", "started"))
        ]
        for pid, started in both:
            processes.kill(pid, started)
        for pid, started in both:
            while True:
                if self._groups.frozen(handle.instance_id):
                    cgroups.kill_all(self._groups, handle.instance_id)
                if processes.wait(pid, started, FREEZE_CHECK_INTERVAL):
                    break
                if time.monotonic() > deadline:
                    raise TemporaryError(f"Process {pid} does not end.", code="instance_stuck")

    def clear(self, instance_id: str) -> None:
        """Remove groups and directory; processes of an interrupted start are killed."""
        if not cgroups.kill_and_remove(self._groups, instance_id, KILL_TIMEOUT):
            raise TemporaryError(
                f"Processes of instance {instance_id} do not end.", code="instance_stuck"
            )
        with self._volumes.detached(instance_id):
            shutil.rmtree(self._handles.directory(instance_id), ignore_errors=True)

    def undo(self, instance_id: str, handle: Handle | None) -> None:
        """Remove what a start that failed has made."""
        try:
            if handle is not None:
                self.kill(handle)
        finally:
            self.clear(instance_id)

    def remove_orphaned_groups(self) -> None:
        """
        Remove control groups of instances without a directory. A directory is made before the
        groups and removed after them, so the groups are listed first.
        """
        groups = self._groups.names()
        directories = self._handles.names()
        for name in groups:
            if not ids.is_instance_id(name) or name in directories:
                continue
            try:
                # Reserves the name: no instance of it can be made meanwhile.
                self._handles.directory(name).mkdir(mode=0o700)
            except FileExistsError:
                continue
            log.warning("instance.groups_orphaned", instance_id=name)
            try:
                self.clear(name)
            except TemporaryError as error:
                log.warning("instance.groups_stay", instance_id=name, error=error.message)
