"""
Pods of instances: their names and handles, and requests that concern one of them.

The cluster is the record. A pod is found by its labels, so that a control plane that starts again
finds all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll import ids
from atoll.drivers.kubernetes import pod_state
from atoll.drivers.kubernetes.api import Priority
from atoll.drivers.kubernetes.errors import CONFLICT, NOT_FOUND, ignored, translated
from atoll.drivers.kubernetes.labels import Annotation
from atoll.errors import AtollError
from atoll.model.instance import Handle, Observation

if TYPE_CHECKING:
    from atoll.drivers.kubernetes.api import ApiClient
    from atoll.drivers.kubernetes.pod_state import PodState
    from atoll.drivers.kubernetes.pod_watch import PodWatch

KIND = "kubernetes"
HANDLE_VERSION = 1
CONFIRMED_GRACE = 1
"""Seconds: the shortest grace period with which a pod is not deleted before its processes end."""


def handle_of(pod: PodState) -> Handle:
    data: dict[str, str | int] = {
        "pod": pod.name,
        "uid": pod.uid,
        "workspace": pod.annotations.get(Annotation.WORKSPACE, pod.instance_id),
        "certificate": pod.annotations.get(Annotation.CERTIFICATE, ""),
        "disk": int(pod.annotations[Annotation.DISK]),
        "mounted": pod.annotations.get(Annotation.MOUNTED, ""),
    }
    return Handle(pod.instance_id, KIND, HANDLE_VERSION, data)


def is_instance(pod: PodState) -> bool:
    """Checks more than the label: other users of the namespace can copy that."""
    if not pod.annotations.get(Annotation.DISK, "").isdecimal():
        return False
    expected = ids.cluster_object_name(pod.instance_id)
    return ids.is_instance_id(pod.instance_id) and pod.name == expected


class InstancePods:
    def __init__(self, api: ApiClient, path: str, watch: PodWatch) -> None:
        """`path` is that of the namespace's pods."""
        self._api = api
        self.path = path
        self._watch = watch

    async def find(self, handle: Handle) -> PodState | None:
        """The pod of the handle; null if it does not exist any more."""
        with translated():
            pod = await self._watch.find(str(handle.data["pod"]))
        return pod if pod is not None and pod.uid == handle.data["uid"] else None

    async def find_or_last_known(self, handle: Handle) -> PodState | None:
        """
        The pod as the cluster last reported it: its address stays the same while the API server
        does not answer.
        """
        try:
            return await self.find(handle)
        except AtollError:
            pod = self._watch.last_known(str(handle.data["pod"]))
            if pod is None or pod.uid != handle.data["uid"]:
                raise
            return pod

    def last_known(self, handle: Handle) -> PodState | None:
        """The pod as the cluster last reported it, also if it has been deleted lately."""
        name = str(handle.data["pod"])
        pod = self._watch.last_known(name) or self._watch.deleted(name)
        return pod if pod is not None and pod.uid == handle.data["uid"] else None

    async def last_seen(self, handle: Handle) -> PodState | None:
        """The pod, also if it has been deleted lately."""
        pod = await self.find(handle)
        if pod is None:
            pod = self._watch.deleted(str(handle.data["pod"]))
        return pod if pod is not None and pod.uid == handle.data["uid"] else None

    async def observe(self, handle: Handle) -> Observation:
        pod = await self.find(handle)
        if pod is not None:
            return pod_state.observation(pod)
        return pod_state.observation_of_deleted(await self.last_seen(handle))

    async def by_id(self, instance_id: str) -> PodState | None:
        with translated():
            return await self._watch.read(ids.cluster_object_name(instance_id))

    async def all(self) -> list[PodState]:
        with translated():
            pods = await self._watch.all()
        return [pod for pod in pods if is_instance(pod)]

    async def apply(
        self, manifest: dict[str, Any], *, priority: Priority = Priority.URGENT
    ) -> PodState:
        with translated():
            path = f"{self.path}/{manifest['metadata']['name']}"
            created = await self._api.apply(path, manifest, priority=priority)
        pod = pod_state.pod_state(created)
        self._watch.note(pod)
        return pod

    async def kill(self, name: str, uid: str, *, confirmed: bool = False) -> None:
        """
        Delete the pod. With `confirmed` it stays until its machine reports that its processes have
        ended; otherwise it is gone at once, and they end a moment later.
        """
        grace = CONFIRMED_GRACE if confirmed else 0
        with translated(), ignored(NOT_FOUND, CONFLICT):
            await self._api.delete(
                f"{self.path}/{name}", gracePeriodSeconds=grace, preconditions={"uid": uid}
            )
