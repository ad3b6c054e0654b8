"""State of this machine's instances, from their processes, control groups and exits."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

from atoll.drivers.shared import processes
from atoll.model.instance import Observation, State
from atoll.model.session import Cause

if TYPE_CHECKING:
    from atoll.drivers.local.spawner_client import SpawnerClient
    from atoll.drivers.shared.cgroups import ControlGroups
    from atoll.model.instance import Handle

EXIT_TIMEOUT = 1.0
"""Seconds that the exit status of an instance that has ended is waited for."""
SIGNALLED, ZYGOTE_LOST = 128, 70
"""Exit codes: above the first of a process that a signal ended; of an executor without a zygote."""


class InstanceStates:
    def __init__(self, groups: ControlGroups, spawner: SpawnerClient) -> None:
        self._groups = groups
        self._spawner = spawner
        self._own: set[str] = set()
        """Instances that this process's spawner has started; their exits arrive here."""

    def add(self, instance_id: str) -> None:
        self._own.add(instance_id)

    def forget(self, handle: Handle) -> None:
        self._spawner.exits.pop(int(handle.data["pid"]), None)
        self._own.discard(handle.instance_id)

    def output(self, handle: Handle) -> str:
        """What an instance printed before it ended; empty if it runs or is not of this process."""
        ended = self._spawner.exits.get(int(handle.data["pid"]))
        return "" if ended is None else ended.printed

    async def observe(self, handle: Handle) -> Observation:
        found = self.observe_now(handle)
        deadline = time.monotonic() + EXIT_TIMEOUT
        while found.state is State.GONE and self._exit_is_due(handle):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.002)
            found = self.observe_now(handle)
        return found

    def _exit_is_due(self, handle: Handle) -> bool:
        """Whether the spawner is about to report how the instance ended."""
        return handle.instance_id in self._own and self._spawner.has(int(handle.data["pid"]))

    def observe_now(self, handle: Handle) -> Observation:
        """The same without a wait for the exit status."""
        data = handle.data
        same = processes.start_time(int(data["child"])) == data["child_started"]
        if same and data["boot"] == processes.boot_id():
            paused = self._groups.frozen(handle.instance_id)
            return Observation(State.PAUSED if paused else State.RUNNING)
        ended = self._spawner.exits.get(int(data["pid"]))
        killed = self._groups.supervisor_kills(handle.instance_id) > 0
        if ended is None:
            return Observation(State.EXITED, Cause.OOM) if killed else Observation(State.GONE)
        return Observation(State.EXITED, self._cause(handle, ended.status, killed=killed))

    def _cause(self, handle: Handle, status: int, *, killed: bool) -> Cause:
        # Bubblewrap exits with its child's exit code, or 128 and the signal, as a shell does.
        code = os.waitstatus_to_exitcode(status)
        if code < 0 or code > SIGNALLED:
            return Cause.OOM if killed else Cause.SIGNAL
        # Files in /tmp stay in memory and may leave no room for another zygote.
        starved = code == ZYGOTE_LOST and self._groups.memory_kills(handle.instance_id) > 0
        return Cause.OOM if starved else Cause.EXIT
