"""
The pods of a node, as one watch keeps them up to date.

`find` answers from memory while the watch is alive and asks the API server otherwise, so that no
session is polled. The watch resumes where it ended; if the server has forgotten that version (410),
all pods are listed again. Pods that are gone are remembered for a while, for the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from typing import TYPE_CHECKING, Any

import aiohttp
import structlog

from atoll.drivers.kubernetes.api import OPENED
from atoll.drivers.kubernetes.errors import GONE, NOT_FOUND, UNAVAILABLE, ApiError, ignored
from atoll.drivers.kubernetes.pod_cache import PodCache
from atoll.drivers.kubernetes.pod_state import PodState, pod_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.drivers.kubernetes.api import ApiClient

WATCH_SECONDS = 300
"""How long the server keeps one watch open; it is resumed then."""
PAGE = 500
FIRST_DELAY, MAX_DELAY = 0.5, 10.0
"""Seconds before a watch that failed is opened again."""
SILENCE = 90.0
"""Seconds without an event, after which it is opened again. A bookmark comes every minute."""
USUAL_LIFE = 5.0
"""Seconds. A watch that ended earlier is opened again after a pause."""

log = structlog.get_logger(__name__)


class PodWatch:
    def __init__(self, api: ApiClient, path: str, selector: str) -> None:
        """`path` is that of the namespace's pods."""
        self._api = api
        self._path = path
        self._selector = selector
        self._cache = PodCache()
        self._version = ""
        """Where the watch goes on; empty if all pods have to be listed."""
        self._is_current = False
        """Whether the watch is open, so that the cache has what the server has."""
        self.failure = ""
        """Why the watch could not be opened the last time; empty if it could."""
        self._failed_at: float | None = None
        """When that began; monotonic clock."""
        self._listing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.lists = 0
        """How often all pods were listed."""

    def subscribe(self, observer: Callable[[PodState], None]) -> None:
        """Call `observer` with every pod that is known now, and with each that changes."""
        self._cache.subscribe(observer)

    async def open(self) -> None:
        await self._list()
        self._task = asyncio.create_task(self._run(), name="watch pods")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def failed_for(self) -> float:
        """Seconds since when the watch cannot be opened; 0 if it can."""
        return 0.0 if self._failed_at is None else time.monotonic() - self._failed_at

    # Pods

    async def find(self, name: str) -> PodState | None:
        """
        The pod; the server is asked unless the watch knows it. Fails at once while the watch cannot
        be opened: requests of many sessions would only wait for their time-outs.
        """
        if self._is_current and (pod := self._cache.get(name)) is not None:
            return pod
        self._check()
        return await self.read(name)

    def last_known(self, name: str) -> PodState | None:
        """The pod as it was before the watch ended, if it has."""
        return self._cache.get(name)

    async def read(self, name: str) -> PodState | None:
        """The pod as the server has it now."""
        moment = self._cache.moment
        with ignored(NOT_FOUND):
            pod = pod_state(await self._api.get(f"{self._path}/{name}"))
            self._cache.put(pod)
            return pod
        self._cache.missing(name, moment)
        return None

    def deleted(self, name: str) -> PodState | None:
        """How a pod that does not exist any more was last seen."""
        return self._cache.deleted(name)

    def known(self) -> list[PodState]:
        """The pods as they were last reported."""
        return list(self._cache)

    async def all(self) -> list[PodState]:
        if not self._is_current:
            self._check()
            await self._list()
        return list(self._cache)

    def _check(self) -> None:
        if self.failure and not self._is_current:
            raise ApiError(UNAVAILABLE, "WatchFailed", self.failure)

    async def wait(
        self, name: str, condition: Callable[[PodState | None], bool]
    ) -> PodState | None:
        """
        Wait until a pod meets the condition, which gets null when it was deleted. While the watch
        is not open, the server is asked from time to time. Callers have a time-out.
        """
        changed = self._cache.watch(name)
        try:
            while True:
                pod = self._cache.get(name)
                if (pod is not None or self.deleted(name) is not None) and condition(pod):
                    return pod
                try:
                    async with asyncio.timeout(None if self._is_current else MAX_DELAY):
                        await changed.wait()
                except TimeoutError:
                    await self._try_to_read(name)
                changed.clear()
        finally:
            self._cache.unwatch(name, changed)

    async def _try_to_read(self, name: str) -> None:
        try:
            await self.read(name)
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as error:
            log.info("pod.not_read", pod=name, error=str(error) or type(error).__name__)

    def note(self, pod: PodState) -> None:
        """An answer of the server to another request."""
        self._cache.put(pod)

    # The watch

    async def _run(self) -> None:
        delay = FIRST_DELAY
        while True:
            began = time.monotonic()
            try:
                if not self._version:
                    await self._list()
                await self._follow()
            except ApiError as error:
                self._version = ""  # Also if it is not the version's fault: a list repairs all.
                if error.status == GONE:
                    log.info("pod_watch.expired", message=error.message)
                else:
                    self._failed(error.message)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._failed(str(error) or type(error).__name__)
            except Exception as error:
                self._version = ""
                log.error("pod_watch.failed", exc_info=error)
            finally:
                self._is_current = False
                self._cache.wake_all()
            if time.monotonic() - began > USUAL_LIFE:
                delay = FIRST_DELAY
                continue
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load
            delay = min(delay * 2, MAX_DELAY)

    def _failed(self, message: str) -> None:
        self.failure = message
        if self._failed_at is None:
            self._failed_at = time.monotonic()
        log.warning("pod_watch.failed", error=message)

    def _succeeded(self) -> None:
        self.failure, self._failed_at = "", None

    async def _follow(self) -> None:
        events = self._api.watch(
            self._path,
            labelSelector=self._selector,
            resourceVersion=self._version,
            timeoutSeconds=str(WATCH_SECONDS),
        )
        async with contextlib.aclosing(events):
            while True:
                try:
                    async with asyncio.timeout(SILENCE):
                        event = await anext(events)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    # Perhaps its version is of a future that a restored storage does not have.
                    self._version = ""
                    raise
                if event["type"] == OPENED:
                    self._is_current = True
                    self._succeeded()
                else:
                    self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        kind, value = event["type"], event["object"]
        if kind == "ERROR":
            raise ApiError(
                int(value.get("code") or GONE),
                value.get("reason") or "",
                value.get("message") or "",
            )
        self._version = value["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return
        pod = pod_state(value)
        if kind == "DELETED":
            self._cache.delete(pod)
        else:
            self._cache.put(pod)

    async def _list(self) -> None:
        """List all pods; calls at the same time share one list."""
        lists = self.lists
        async with self._listing:
            if self._is_current or self.lists > lists:
                return
            moment = self._cache.moment
            version, found = await self._fetch()
            self.lists += 1
            if not self._is_current:  # The watch, opened meanwhile, knows more.
                self._cache.replace(found, moment)
                self._version = version
                self._succeeded()

    async def _fetch(self) -> tuple[str, dict[str, PodState]]:
        found: dict[str, PodState] = {}
        params = {"labelSelector": self._selector, "limit": str(PAGE)}
        while True:
            answer = await self._api.get(self._path, **params)
            for item in answer.get("items") or ():
                pod = pod_state(item)
                found[pod.name] = pod
            params["continue"] = answer["metadata"].get("continue") or ""
            if not params["continue"]:
                return answer["metadata"]["resourceVersion"], found
