"""What the executor of a pod enforces, and whether the cluster ended a pod for its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.drivers.kubernetes import pod_state
from atoll.drivers.shared import cgroups
from atoll.model.session import Cause

if TYPE_CHECKING:
    from atoll.drivers.kubernetes.instance_pods import InstancePods
    from atoll.model.instance import Handle
    from atoll.model.resources import Resources

OWN_PROCESSES = 3
"""
Processes beside user code that have its uid: the supervisor, the zygote, and the process with which
the cluster keeps the namespaces of the pod.
"""


class KubernetesLimits:
    def __init__(self, pods: InstancePods) -> None:
        self._pods = pods

    def executor_limits(
        self, handle: Handle, resources: Resources
    ) -> tuple[dict[str, int], dict[str, int]]:
        # Each pod has a uid of its own, so the limit of a uid is one of the pod.
        limits = {
            "FSIZE": resources.disk,
            "NPROC": resources.max_processes + OWN_PROCESSES,
        }
        watch = {
            # A kubelet may end the pod with all that is in it when one process runs out of memory.
            "memory": resources.memory,
            "sockets": cgroups.uncharged_sockets(resources),
        }
        # A handle of an earlier version lacks this entry.
        if not handle.data.get("mounted"):
            watch["disk"] = resources.disk
        return limits, watch

    async def out_of_memory(self, handle: Handle) -> bool:
        # Called for every execution, which must not depend on the API server.
        pod = self._pods.last_known(handle)
        return pod is not None and pod_state.observation(pod).cause is Cause.OOM

    async def memory_used(self, handle: Handle) -> int | None:
        return None
