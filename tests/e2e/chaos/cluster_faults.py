"""
Faults of a Kubernetes cluster: pods that are removed, machines that fail, and outages of the
control plane. Of each group there is one fault at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx

from tests.chosen_cluster import NAMESPACE
from tests.e2e.chaos.plan import Kind
from tests.host_processes import below
from tests.servers.kubernetes.cluster import Cluster

PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
Act = Callable[[str], object]
API_SERVER, ETCD = "kube-apiserver", "etcd"


class ClusterFaults:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._control_plane = asyncio.Lock()
        """Held while it fails, and while it removes a pod."""
        self._machines = asyncio.Lock()

    async def remove_pod(self, kind: Kind, pod: str) -> bool:
        """Whether the cluster ends the pod. It does not while its control plane fails."""
        if self._control_plane.locked():
            return False
        async with self._control_plane:
            return await asyncio.to_thread(self._remove_pod, kind, pod)

    def _remove_pod(self, kind: Kind, pod: str) -> bool:
        if kind is Kind.EVICT_POD:
            eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
            answer = self._cluster.client.post(f"{PODS}/{pod}/eviction", json=eviction)
        else:
            options = {"gracePeriodSeconds": 0} if kind is Kind.FORCE_POD else {}
            answer = self._cluster.client.request("DELETE", f"{PODS}/{pod}", json=options)
        if answer.status_code == httpx.codes.NOT_FOUND:
            return False
        assert answer.is_success, answer.text
        return True

    async def fail_control_plane(self, kind: Kind, seconds: float) -> bool:
        """Whether it failed; it may be failing already."""
        cluster = self._cluster
        acts: dict[Kind, tuple[Act, Act]] = {
            Kind.KILL_API_SERVER: (cluster.kill, cluster.restart),
            Kind.PAUSE_API_SERVER: (cluster.pause, cluster.resume),
            Kind.PAUSE_ETCD: (cluster.pause, cluster.resume),
        }
        component = ETCD if kind is Kind.PAUSE_ETCD else API_SERVER
        if self._control_plane.locked():
            return False
        async with self._control_plane:
            return await _for_a_while(acts[kind], component, seconds)

    async def fail_machine(self, kind: Kind, name: str, seconds: float) -> bool:
        """Whether it failed; one may be failing already. A lost machine starts again."""
        cluster = self._cluster
        acts: dict[Kind, tuple[Act, Act]] = {
            Kind.KILL_MACHINE: (cluster.kill_node, cluster.start_node),
            Kind.KILL_KUBELET: (cluster.kill_kubelet, cluster.start_kubelet),
            Kind.RESTART_CONTAINERD: (cluster.restart_containerd, _nothing),
        }
        if self._machines.locked():
            return False
        async with self._machines:
            return await _for_a_while(acts[kind], name, seconds)

    def machine_of(self, process: int) -> str | None:
        """The machine on which a process runs, by its pid on the host."""
        for name, node in self._cluster.nodes.items():
            if process in below(node.pid):
                return name
        return None


async def _for_a_while(acts: tuple[Act, Act], name: str, seconds: float) -> bool:
    begin, end = acts
    await asyncio.to_thread(begin, name)
    try:
        await asyncio.sleep(seconds)
    finally:
        await asyncio.to_thread(end, name)
    return True


def _nothing(name: str) -> None: ...
