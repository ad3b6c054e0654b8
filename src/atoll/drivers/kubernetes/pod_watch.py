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
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import aiohttp
import structlog

from atoll.drivers.kubernetes.errors import GONE, NOT_FOUND, UNAVAILABLE, ApiError, ignored
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
MAX_DELETED = 2000

log = structlog.get_logger(__name__)


class PodWatch:
    def __init__(self, api: ApiClient, path: str, selector: str) -> None:
        """`path` is that of the namespace's pods."""
        self._api = api
        self._path = path
        self._selector = selector
        self._pods: dict[str, PodState] = {}
        self._deleted: OrderedDict[str, PodState] = OrderedDict()
        self._version = ""
        self._is_current = False
        """Whether the watch is open, so that `_pods` is what the server has."""
        self._failure = ""
        """Why the watch could not be opened the last time; empty if it could."""
        self._changes: dict[str, list[asyncio.Event]] = {}
        self._observers: list[Callable[[PodState], None]] = []
        self._task: asyncio.Task[None] | None = None
        self.lists = 0
        """How often all pods were listed."""

    def subscribe(self, observer: Callable[[PodState], None]) -> None:
        """Call `observer` with every pod that is known now, and with each that changes."""
        self._observers.append(observer)
        for pod in list(self._pods.values()):
            observer(pod)

    async def open(self) -> None:
        await self._list()
        self._task = asyncio.create_task(self._run(), name="watch pods")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    # Pods

    async def find(self, name: str) -> PodState | None:
        """
        The pod; the server is asked unless the watch knows it. Fails at once while the watch cannot
        be opened: requests of many sessions would only wait for their time-outs.
        """
        if self._is_current and name in self._pods:
            return self._pods[name]
        if self._failure and not self._is_current:
            raise ApiError(UNAVAILABLE, "WatchFailed", self._failure)
        return await self.read(name)

    def last_known(self, name: str) -> PodState | None:
        """The pod as it was before the watch ended, if it has."""
        return self._pods.get(name)

    async def read(self, name: str) -> PodState | None:
        """The pod as the server has it now."""
        with ignored(NOT_FOUND):
            pod = pod_state(await self._api.get(f"{self._path}/{name}"))
            self._put(pod)
            return pod
        self._remove(name)
        return None

    def deleted(self, name: str) -> PodState | None:
        """How a pod that does not exist any more was last seen."""
        return self._deleted.get(name)

    async def all(self) -> list[PodState]:
        if not self._is_current:
            await self._list()
        return list(self._pods.values())

    async def wait(
        self, name: str, condition: Callable[[PodState | None], bool]
    ) -> PodState | None:
        """
        Wait until a pod meets the condition, which gets null when it was deleted. While the watch
        is not open, the server is asked from time to time.
        """
        changed = asyncio.Event()
        self._changes.setdefault(name, []).append(changed)
        try:
            while True:
                pod = self._pods.get(name)
                if (pod is not None or name in self._deleted) and condition(pod):
                    return pod
                try:
                    async with asyncio.timeout(None if self._is_current else MAX_DELAY):
                        await changed.wait()
                except TimeoutError:
                    await self.read(name)
                changed.clear()
        finally:
            self._changes[name].remove(changed)
            if not self._changes[name]:
                del self._changes[name]

    # The watch

    async def _run(self) -> None:
        delay = FIRST_DELAY
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._follow()
                delay = FIRST_DELAY
                continue
            except ApiError as error:
                if error.status == GONE:
                    self._version = ""
                    log.info("pod_watch.expired", message=error.message)
                    continue
                self._failure = error.message
                log.warning("pod_watch.failed", status=error.status, error=error.message)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self._failure = str(error) or type(error).__name__
                log.warning("pod_watch.failed", error=self._failure)
            except Exception as error:
                log.error("pod_watch.failed", exc_info=error)
                self._version = ""
            finally:
                self._is_current = False
                self._wake_all()
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load
            delay = min(delay * 2, MAX_DELAY)

    async def _follow(self) -> None:
        events = self._api.watch(
            self._path,
            labelSelector=self._selector,
            resourceVersion=self._version,
            timeoutSeconds=str(WATCH_SECONDS),
        )
        async with contextlib.aclosing(events):
            self._is_current, self._failure = True, ""
            while True:
                try:
                    async with asyncio.timeout(SILENCE):
                        event = await anext(events)
                except StopAsyncIteration:
                    return
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
            known = self._pods.get(pod.name)
            if known is None or known.uid == pod.uid:
                self._deleted[pod.name] = pod
                self._remove(pod.name)
        else:
            self._put(pod)

    async def _list(self) -> None:
        self.lists += 1
        found: dict[str, PodState] = {}
        params = {"labelSelector": self._selector, "limit": str(PAGE)}
        while True:
            answer = await self._api.get(self._path, **params)
            for item in answer.get("items") or ():
                pod = pod_state(item)
                found[pod.name] = pod
            params["continue"] = answer["metadata"].get("continue") or ""
            if not params["continue"]:
                break
        version = answer["metadata"]["resourceVersion"]
        for name in self._pods.keys() - found.keys():
            # A newer one was made while the server answered.
            if int(self._pods[name].version) <= int(version):
                self._remove(name)
        for pod in found.values():
            self._put(pod)
        self._version, self._failure = version, ""

    # Changes

    def note(self, pod: PodState) -> None:
        """An answer of the server to another request."""
        self._put(pod)

    def _put(self, pod: PodState) -> None:
        known = self._pods.get(pod.name)
        if known is not None and known.uid == pod.uid and int(known.version) > int(pod.version):
            return  # An answer that was overtaken by the watch.
        self._pods[pod.name] = pod
        gone = self._deleted.get(pod.name)
        if gone is not None and gone.uid != pod.uid:
            del self._deleted[pod.name]  # Another pod has its name now.
        for observer in self._observers:
            observer(pod)
        self._wake(pod.name)

    def _remove(self, name: str) -> None:
        pod = self._pods.pop(name, None)
        if pod is not None:
            self._deleted.setdefault(name, pod)
            while len(self._deleted) > MAX_DELETED:
                self._deleted.popitem(last=False)
        self._wake(name)

    def _wake(self, name: str) -> None:
        for changed in self._changes.get(name, ()):
            changed.set()

    def _wake_all(self) -> None:
        for name in self._changes:
            self._wake(name)
