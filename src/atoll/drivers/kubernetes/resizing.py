"""
Changes the limits of running pods, where the cluster can do that in place.

A kubelet accepts a change, makes it, and reports that up to a second later. Callers wait for the
report only if the memory shrinks: then the change may fail after it was accepted. If it grows, the
executor shows when it has grown.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
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
from atoll.link.errors import ExecutorError, LinkLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.drivers.kubernetes.api import ApiClient
    from atoll.drivers.kubernetes.instance_links import InstanceLinks
    from atoll.drivers.kubernetes.instance_pods import InstancePods
    from atoll.drivers.kubernetes.pod_state import PodState
    from atoll.drivers.kubernetes.pod_watch import PodWatch
    from atoll.model.instance import Handle
    from atoll.model.resources import Resources
    from atoll.settings import KubernetesSettings

TIMEOUT = timedelta(seconds=10)
"""For the kubelet to change the limits."""
POLL = 0.01
"""Seconds."""
PAGE = 4096
"""Bytes to which the kernel rounds limits."""
IMPOSSIBLE = frozenset({"Infeasible", "Deferred"})

log = structlog.get_logger(__name__)


async def is_possible(api: ApiClient, namespace: str) -> bool:
    """Whether the cluster can do it (Kubernetes 1.33), and Atoll may."""
    with translated():
        found = await api.get("/api/v1")
        known = any(item["name"] == "pods/resize" for item in found["resources"])
        return known and await api.may(namespace, "patch", "pods", subresource="resize")


class KubernetesResizing:
    def __init__(
        self,
        api: ApiClient,
        pods: InstancePods,
        watch: PodWatch,
        links: InstanceLinks,
        settings: KubernetesSettings,
    ) -> None:
        self._api = api
        self._pods = pods
        self._watch = watch
        self._links = links
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
                changed = await self._api.patch(
                    f"{self._pods.path}/{pod.name}/resize", body, kind=STRATEGIC_PATCH
                )
            except ApiError as error:
                if error.status not in (NOT_FOUND, CONFLICT, INVALID, FORBIDDEN):
                    raise
                log.info(
                    "instance.not_resized", instance_id=handle.instance_id, error=error.message
                )
                return False
        generation = int(changed["metadata"].get("generation") or 0)
        grows = _is_at_least(wanted, pod)

        def is_done(now: PodState) -> bool:
            if now.resize in IMPOSSIBLE or 0 < now.observed < generation:
                return False
            accepted = bool(now.observed)
            return (grows and accepted) or (not now.resizing and _has(now, wanted))

        if not await self._wait(pod.name, generation, is_done):
            return False
        if grows:
            await self._wait_for_growth(handle, pod, resources)
        return True

    async def _wait_for_growth(self, handle: Handle, pod: PodState, resources: Resources) -> None:
        """
        Wait until user code can use the memory. The cluster has accepted the change, so nothing is
        undone if that cannot be seen.
        """
        wanted = resources.memory + pod_manifest.MEMORY_MARGIN - PAGE
        try:
            link = await self._links.connect(handle, pod, timeout=TIMEOUT)
        except LinkLost as error:
            log.info("growth.not_seen", instance_id=handle.instance_id, error=error.message)
            return
        try:
            async with asyncio.timeout(TIMEOUT.total_seconds()):
                # The kernel reports no event.
                while 0 < (await link.call("memory_limit"))["bytes"] < wanted:  # noqa: ASYNC110
                    await asyncio.sleep(POLL)
        except ExecutorError:
            pass  # It is older than this request.
        except (LinkLost, TimeoutError) as error:
            log.info("growth.not_seen", instance_id=handle.instance_id, error=str(error))
        finally:
            link.close()

    async def _wait(self, name: str, generation: int, is_done: Callable[[PodState], bool]) -> bool:
        def is_over(pod: PodState | None) -> bool:
            if pod is None or pod.ended or is_done(pod):
                return True
            # Not the answer to an earlier change.
            return pod.resize in IMPOSSIBLE and (not pod.observed or pod.observed >= generation)

        try:
            async with asyncio.timeout(TIMEOUT.total_seconds()):
                pod = await self._watch.wait(name, is_over)
        except TimeoutError:
            return False
        return pod is not None and is_done(pod)


def _is_at_least(wanted: dict[str, str], pod: PodState) -> bool:
    """Whether the pod has no more memory than is wanted, and will not get more."""
    found = [limits["memory"] for limits in (pod.resources, pod.limits) if "memory" in limits]
    return bool(found) and quantity(wanted["memory"]) >= max(map(quantity, found))


def _has(pod: PodState, wanted: dict[str, str]) -> bool:
    return all(
        name in pod.resources and quantity(pod.resources[name]) == quantity(amount)
        for name, amount in wanted.items()
    )
