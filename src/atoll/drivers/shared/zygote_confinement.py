"""
Moves the zygote of an instance to the control group of user code before it may fork.

User code can kill its zygote at any time, also while it is being moved. So the newest zygote is
moved and released. If that fails, the link is closed, and its owner connects and starts again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.shared import processes
from atoll.errors import AtollError, TemporaryError
from atoll.link.errors import LinkLost, ZygoteReplaced

if TYPE_CHECKING:
    from atoll.drivers.shared.cgroups import ControlGroups
    from atoll.link.client import Link

log = structlog.get_logger(__name__)


class ZygoteConfinement:
    def __init__(self, groups: ControlGroups, instance_id: str, link: Link) -> None:
        self._groups = groups
        self._instance_id = instance_id
        self._link = link
        self._newest = int(link.hello["zygote"])
        self._settling = False
        self._task: asyncio.Task[None] | None = None
        link.observe_zygotes(self._renewed)

    async def settle(self) -> dict[str, str]:
        """Confine and release the newest zygote; returns the modules that it failed to preload."""
        self._settling = True
        try:
            while True:
                zygote = self._newest
                try:
                    if self._groups.provides:
                        await asyncio.to_thread(self._confine, zygote)
                    answer = await self._link.call("release", zygote=zygote)
                except AtollError as error:
                    if self._newest != zygote:
                        continue
                    if isinstance(error, ZygoteReplaced):
                        # Its successor was reported before this object subscribed.
                        raise LinkLost(f"{self._instance_id} has another zygote.") from error
                    raise
                if self._newest == zygote:
                    return dict(answer["preload_failed"])
        finally:
            self._settling = False

    def _renewed(self, zygote: int) -> None:
        self._newest = zygote
        if not self._settling:
            # Before the task runs: an event that comes meanwhile must not make a second one.
            self._settling = True
            self._task = asyncio.get_running_loop().create_task(self._settle_again())

    async def _settle_again(self) -> None:
        try:
            await self.settle()
        except Exception as error:  # noqa: BLE001 - not awaited; the link is closed
            if self._link.alive:
                log.warning(
                    "instance.not_confined", instance_id=self._instance_id, error=repr(error)
                )
            self._link.close()

    def _confine(self, zygote: int) -> None:
        why = "it is not one of the instance's processes"
        for pid in self._groups.processes(self._instance_id):
            if processes.namespace_pid(pid) == zygote:
                try:
                    self._groups.confine(self._instance_id, pid)
                    return
                except OSError as error:
                    why = str(error)
        raise TemporaryError(
            f"The zygote of instance {self._instance_id} cannot be confined: {why}.",
            code="instance_not_confined",
        )
