"""
The load of a cluster, as far as its namespace shows it: what the instances have reserved, of the
namespace's quota or of what the settings say the cluster has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.drivers.kubernetes.errors import FORBIDDEN, ignored
from atoll.drivers.kubernetes.quantity import quantity
from atoll.model.node import NodeMetrics

if TYPE_CHECKING:
    from atoll.drivers.kubernetes.api import ApiClient
    from atoll.drivers.kubernetes.pod_watch import PodWatch
    from atoll.settings import KubernetesSettings


class ClusterLoad:
    def __init__(
        self, api: ApiClient, namespace: str, watch: PodWatch, settings: KubernetesSettings
    ) -> None:
        self._api = api
        self._path = f"{namespace}/resourcequotas"
        self._watch = watch
        self._settings = settings
        self._cpus = float(settings.cpus)
        self._memory = float(settings.memory)

    async def open(self) -> None:
        """Read the quotas of the namespace, if Atoll may."""
        with ignored(FORBIDDEN):
            found = await self._api.get(self._path)
            for item in found.get("items") or ():
                hard = item["spec"].get("hard") or {}
                self._cpus = min(self._cpus, _first(hard, "limits.cpu", "requests.cpu", "cpu"))
                self._memory = min(
                    self._memory, _first(hard, "limits.memory", "requests.memory", "memory")
                )

    def metrics(self) -> NodeMetrics:
        cpu = memory = 0.0
        for pod in self._watch.known():
            if not pod.ended:
                limits = pod.resources or pod.limits
                cpu += quantity(limits.get("cpu", "0"))
                memory += quantity(limits.get("memory", "0"))
        return self._metrics(cpu, memory)

    def _metrics(self, cpu: float, memory: float) -> NodeMetrics:
        """From the limits of all instances together."""
        reserved = cpu * self._settings.cpu_request
        return NodeMetrics(
            cpu_usage=min(1.0, reserved / self._cpus),
            mem_usage=min(1.0, memory * self._settings.memory_request / self._memory),
            disk_free=0,
            cpu_count=int(self._cpus),
            mem_total=int(self._memory),
            load_average=reserved,
        )


def _first(values: dict[str, str], *names: str) -> float:
    return next((quantity(values[name]) for name in names if name in values), float("inf"))
