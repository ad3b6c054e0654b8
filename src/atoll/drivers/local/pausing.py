"""Pauses instances by the freezer of their control groups."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from atoll.drivers.shared.cancellation import run_to_end
from atoll.errors import TemporaryError
from atoll.model.instance import State

if TYPE_CHECKING:
    from atoll.drivers.local.instance_state import InstanceStates
    from atoll.drivers.shared.cgroups import ControlGroups
    from atoll.model.instance import Handle

PAUSE_TIMEOUT = 10.0
"""Seconds within which all processes of an instance must be frozen."""


class LocalPausing:
    def __init__(self, groups: ControlGroups, states: InstanceStates) -> None:
        self._groups = groups
        self._states = states

    async def pause(self, handle: Handle) -> None:
        if (await self._states.observe(handle)).state not in (State.RUNNING, State.PAUSED):
            return
        freeze, name = self._groups.freeze, handle.instance_id
        # A thread cannot be cancelled, and a resume() must not overtake it.
        frozen = await run_to_end(asyncio.to_thread(freeze, name, PAUSE_TIMEOUT))
        if not frozen and (await self._states.observe(handle)).state is State.RUNNING:
            raise TemporaryError(
                f"Processes of instance {handle.instance_id} could not be frozen within "
                f"{PAUSE_TIMEOUT:g} s; the instance keeps running.",
                code="pause_timeout",
            )

    async def resume(self, handle: Handle) -> None:
        if (await self._states.observe(handle)).state is State.PAUSED:
            await asyncio.to_thread(self._groups.thaw, handle.instance_id)
