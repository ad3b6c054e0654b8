"""
The pods of a node as they were last reported, and those that do not exist any more.

Answers and events may arrive in another order than the server sent them. A pod that was reported as
deleted never comes back, and what became known while a list was under way outweighs the list.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from atoll.drivers.kubernetes.pod_state import PodState

MAX_DELETED = 5000
"""Deleted pods that are remembered, for the reason of their end."""


class PodCache:
    def __init__(self) -> None:
        self._pods: dict[str, PodState] = {}
        self._deleted: OrderedDict[str, PodState] = OrderedDict()
        """By uid."""
        self._last_uids: dict[str, str] = {}
        """Uid of the pod of each name that was deleted last."""
        self._changes = 0
        self._changed: dict[str, int] = {}
        """By name, which change was the last one."""
        self._waiting: dict[str, list[asyncio.Event]] = {}
        self._observers: list[Callable[[PodState], None]] = []

    def __iter__(self) -> Iterator[PodState]:
        return iter(list(self._pods.values()))

    def get(self, name: str) -> PodState | None:
        return self._pods.get(name)

    def deleted(self, name: str) -> PodState | None:
        """How the last pod of this name that was deleted was seen last."""
        return self._deleted.get(self._last_uids.get(name, ""))

    def subscribe(self, observer: Callable[[PodState], None]) -> None:
        """Call `observer` with every pod that is known now, and with each that changes."""
        self._observers.append(observer)
        for pod in self:
            observer(pod)

    # Changes

    @property
    def moment(self) -> int:
        """To be passed with an answer to a request that is sent now."""
        return self._changes

    def put(self, pod: PodState) -> None:
        if pod.uid in self._deleted:
            return
        known = self._pods.get(pod.name)
        if known is not None and known.uid == pod.uid and _is_older(pod.version, known.version):
            return  # An answer that was overtaken by the watch.
        self._set(pod)

    def delete(self, pod: PodState) -> None:
        """The server reports the end of a pod; another one of its name may exist."""
        self._bury(pod)
        known = self._pods.get(pod.name)
        if known is not None and known.uid == pod.uid:
            del self._pods[pod.name]
        self._wake(pod.name)

    def missing(self, name: str, since: int) -> None:
        """The server has no pod of this name, as it answered to a request of that moment."""
        pod = self._pods.get(name)
        if pod is not None and self._changed[name] <= since:
            self.delete(pod)
        else:
            self._wake(name)

    def replace(self, pods: dict[str, PodState], since: int) -> None:
        """All pods by name, as the server listed them from that moment on."""
        for name in self._pods.keys() - pods.keys():
            self.missing(name, since)
        for pod in pods.values():
            if self._changed.get(pod.name, 0) > since:
                self.put(pod)
            elif pod.uid not in self._deleted:
                # Also one with an older version: the server's storage may have been restored.
                self._set(pod)

    def _set(self, pod: PodState) -> None:
        self._changes += 1
        self._changed[pod.name] = self._changes
        self._pods[pod.name] = pod
        self._wake(pod.name)
        for observer in self._observers:
            observer(pod)

    def _bury(self, pod: PodState) -> None:
        self._changes += 1
        self._deleted[pod.uid] = pod
        self._last_uids[pod.name] = pod.uid
        while len(self._deleted) > MAX_DELETED:
            uid, oldest = self._deleted.popitem(last=False)
            if self._last_uids.get(oldest.name) == uid:
                del self._last_uids[oldest.name]
            if oldest.name not in self._pods:
                self._changed.pop(oldest.name, None)

    # Waiters

    def watch(self, name: str) -> asyncio.Event:
        """An event that is set with each change of the pod, until `unwatch`."""
        event = asyncio.Event()
        self._waiting.setdefault(name, []).append(event)
        return event

    def unwatch(self, name: str, event: asyncio.Event) -> None:
        self._waiting[name].remove(event)
        if not self._waiting[name]:
            del self._waiting[name]

    def wake_all(self) -> None:
        for name in self._waiting:
            self._wake(name)

    def _wake(self, name: str) -> None:
        for event in self._waiting.get(name, ()):
            event.set()


def _is_older(version: str, other: str) -> bool:
    """Whether a resource version is older; versions that are no numbers cannot be compared."""
    return version.isdecimal() and other.isdecimal() and int(version) < int(other)
