"""Changes the limits of running pods, where the cluster can do that in place."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.kubernetes import pod_manifest
from atoll.drivers.kubernetes.api import STRATEGIC_PATCH
from atoll.drivers.kubernetes.errors import (
    CONFLICT,
    FORBIDDEN,
    INVALID,
    NOT_FOUND,
    ApiError,
    translated,
)
from atoll.drivers.kubernetes.pod_state import CONTAINER
from atoll.drivers.kubernetes.quantity import quantity

if TYPE_CHECKING:
    from atoll.drivers.kubernetes.api import ApiClient
    from atoll.drivers.kubernetes.instance_pods import InstancePods
    from atoll.drivers.kubernetes.pod_state import PodState
    from atoll.drivers.kubernetes.pod_watch import PodWatch
    from atoll.model.instance import Handle
    from atoll.model.resources import Resources
    from atoll.settings import KubernetesSettings

TIMEOUT = 10.0
"""Seconds for the kubelet to change the limits."""
IMPOSSIBLE = frozenset({"Infeasible", "Deferred"})

log = structlog.get_logger(__name__)


class KubernetesResizing:
    def __init__(
        self, api: ApiClient, pods: InstancePods, watch: PodWatch, settings: KubernetesSettings
    ) -> None:
        self._api = api
        self._pods = pods
        self._watch = watch
        self._settings = settings

    async def resize(self, handle: Handle, resources: Resources) -> bool:
        pod = await self._pods.find(handle)
        if pod is None or resources.disk > int(handle.data["disk"]):
            return False  # The size of a directory of a pod cannot be changed.
        wanted = pod_manifest.limits(resources)
        change = {
            "limits": wanted,
            "requests": pod_manifest.requests(resources, self._settings),
        }
        body = {"spec": {"containers": [{"name": CONTAINER, "resources": change}]}}
        with translated():
            try:
                await self._api.patch(
                    f"{self._pods.path}/{pod.name}/resize", body, kind=STRATEGIC_PATCH
                )
            except ApiError as error:
                if error.status not in (NOT_FOUND, CONFLICT, INVALID, FORBIDDEN):
                    raise
                log.info(
                    "instance.not_resized", instance_id=handle.instance_id, error=error.message
                )
                return False
        return await self._is_done(pod.name, wanted)

    async def _is_done(self, name: str, wanted: dict[str, str]) -> bool:
        def is_over(pod: PodState | None) -> bool:
            return pod is None or pod.ended or pod.resize in IMPOSSIBLE or _has(pod, wanted)

        try:
            async with asyncio.timeout(TIMEOUT):
                pod = await self._watch.wait(name, is_over)
        except TimeoutError:
            return False
        return pod is not None and _has(pod, wanted)


def _has(pod: PodState, wanted: dict[str, str]) -> bool:
    return all(
        name in pod.resources and quantity(pod.resources[name]) == quantity(amount)
        for name, amount in wanted.items()
    )
