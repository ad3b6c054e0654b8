"""
Runs pods that find something out and are removed: what is in an image, or what the network allows.

They are confined like instances. The cluster ends them after a while, also without Atoll.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from atoll.drivers.kubernetes import pod_manifest
from atoll.drivers.kubernetes.errors import translated
from atoll.drivers.kubernetes.labels import Label
from atoll.drivers.kubernetes.pod_manifest import ImageFacts, PodRequest
from atoll.drivers.shared.uids import new_uid
from atoll.model.resources import Resources

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.drivers.kubernetes.instance_pods import InstancePods
    from atoll.drivers.kubernetes.pod_state import PodState
    from atoll.drivers.kubernetes.pod_watch import PodWatch
    from atoll.settings import KubernetesSettings

MiB = 1024 * 1024
RESOURCES = Resources(cpu=1.0, memory=128 * MiB, disk=16 * MiB, max_processes=32)
DEADLINE_MARGIN = 60
"""Seconds after the time-out of a probe when the cluster ends its pod."""


class ProbePods:
    def __init__(
        self,
        pods: InstancePods,
        watch: PodWatch,
        settings: KubernetesSettings,
        labels: dict[str, str],
        uids: range,
    ) -> None:
        self._pods = pods
        self._watch = watch
        self._settings = settings
        self._labels = labels
        self._uids = uids

    def request(
        self,
        program: str,
        image: ImageFacts,
        runtime_class: str | None = None,
        *,
        timeout: float,
        pull: str = "IfNotPresent",
        labels: dict[str, str],
    ) -> PodRequest:
        """A pod that runs a Python program; `labels` come on top of those of the node."""
        default = self._settings.runtime_class
        return PodRequest(
            name=f"atoll-probe-{secrets.token_hex(6)}",
            labels={**self._labels, **labels},
            image=image,
            resources=RESOURCES,
            uid=new_uid(self._uids),
            command=[*pod_manifest.python_command(image), "-I", "-S", "-c", program],
            runtime_class=default if runtime_class is None else runtime_class,
            pull=pull,
            deadline=int(timeout) + DEADLINE_MARGIN,
        )

    async def run(
        self, request: PodRequest, is_over: Callable[[PodState | None], bool], *, timeout: float
    ) -> PodState | None:
        """
        The pod when `is_over` is true of it; null if it was deleted. It is removed then. Raises
        `TimeoutError`.
        """
        created = await self._pods.apply(pod_manifest.pod(request, self._settings))
        try:
            async with asyncio.timeout(timeout):
                with translated():
                    return await self._watch.wait(created.name, is_over)
        finally:
            await asyncio.shield(self._pods.kill(created.name, created.uid))

    async def remove_ended(self) -> None:
        """Remove pods whose replica has ended before them."""
        with translated():
            pods = await self._watch.all()
        for pod in pods:
            if Label.PROBE in pod.labels and pod.ended:
                await self._pods.kill(pod.name, pod.uid)
