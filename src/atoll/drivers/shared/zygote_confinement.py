"""
The zygote at the other end of a link: in its control group before it may have children.

User code can kill its zygote at any time, also while it is being confined. Whichever is the newest
is confined and released; when that fails the link is closed, so that its owner makes a new one and
the work is done again from the start.
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


class Confinement:
    def __init__(self, groups: ControlGroups, instance_id: str, link: Link) -> None:
        self._groups = groups
        self._instance_id = instance_id
        self._link = link
        self._newest = int(link.hello["zygote"])
        self._settling = False
        self._task: asyncio.Task[None] | None = None
        link.observe_zygotes(self._renewed)

    async def settle(self) -> dict[str, str]:
        """Until the newest zygote may have children: what it could not import, and why."""
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
        except Exception as error:  # noqa: BLE001 - nobody awaits this task; the link's end tells
            if self._link.alive:
                log.warning(
                    "instance.not_confined", instance_id=self._instance_id, error=repr(error)
                )
            self._link.close()

    def _confine(self, zygote: int) -> None:
        why = "it is not among the instance's processes"
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
