"""A cluster as a node of the driver contract."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from atoll.drivers.kubernetes.labels import Label
from atoll.model.instance import Handle
from tests.contract.drivers.conftest import Node, template
from tests.host_processes import living
from tests.kubernetes.pods import first_process, processes_of_pod
from tests.servers.kubernetes.cluster import Cluster


class ClusterNode(Node):
    """All of them share a namespace, and what is known about the image."""

    def __init__(self, kind: str, data_dir: Path, cluster: Cluster, namespace: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        super().__init__(kind, data_dir, None)

    @property
    def where(self) -> dict[str, Any]:
        return {"kubeconfig": str(self._cluster.kubeconfig), "namespace": self._namespace}

    async def open(self) -> None:
        await self.driver.open()
        # What a template's build does.
        await self.driver.images.build(
            template(), timeout=timedelta(seconds=60), on_output=lambda text: None
        )

    def pid_1(self, handle: Handle) -> int:
        first = first_process(str(handle.data["uid"]))
        assert first is not None, f"{handle.instance_id} has ended"
        return first

    def inside(self, handle: Handle) -> set[int]:
        return processes_of_pod(str(handle.data["uid"]))

    async def await_end(self, pids: set[int]) -> None:
        # The machine of a pod is not waited for: it may be lost.
        self._cluster.wait(lambda: not pids & living(), "the end of its processes")

    @property
    def counts_memory(self) -> bool:
        return False

    async def alone(self) -> bool:
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        return not self._cluster.ask("GET", path, params={"labelSelector": Label.NODE})["items"]
