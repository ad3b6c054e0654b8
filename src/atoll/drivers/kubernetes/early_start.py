"""
Starts executors before the cluster reports that their containers run.

A kubelet reports that up to a second late. An attempt to attach to a container that does not run
yet fails and changes nothing, so it is repeated for a moment. Many starts at once are limited by
the cluster, which such attempts would slow: only some of them are made early.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from atoll.drivers.kubernetes.errors import ClusterRefused, ClusterUnavailable
from atoll.drivers.kubernetes.executor_start import NotStarted
from atoll.drivers.kubernetes.pod_start import is_scheduled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.drivers.kubernetes.pod_state import PodState
    from atoll.drivers.kubernetes.pod_watch import PodWatch

PAUSES = (0.25, *(0.05,) * 8, *(0.1,) * 5, *(0.25,) * 4)
"""Seconds before each attempt, from when the pod has a machine."""
CONCURRENCY = 4


class EarlyStarts:
    def __init__(self, watch: PodWatch) -> None:
        self._watch = watch
        self._slots = asyncio.Semaphore(CONCURRENCY)

    async def attempt(
        self,
        created: PodState,
        reported: asyncio.Future[PodState],
        start: Callable[[], Awaitable[str]],
    ) -> str | None:
        """
        The result of `start`, unless `reported`, which is the cluster's report that the pod runs,
        comes first or no attempt was successful.
        """
        if self._slots.locked():
            return None
        async with self._slots:
            waiting = self._watch.wait(created.name, is_scheduled)
            scheduled: asyncio.Future[Any] = asyncio.ensure_future(waiting)
            either: list[asyncio.Future[Any]] = [scheduled, reported]
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                scheduled.cancel()
            for pause in PAUSES:
                await asyncio.wait([reported], timeout=pause)
                if reported.done():
                    break
                try:
                    return await start()
                except (NotStarted, ClusterRefused, ClusterUnavailable):
                    continue
        return None
