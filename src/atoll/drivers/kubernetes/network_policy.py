"""
The network policy of instances, and whether the cluster enforces it.

One policy applies to all instances of a node: nothing may be connected to from inside, and only
Atoll's own pods may connect to an executor. A cluster accepts policies also if its network does not
enforce them. So a pod that no policy allows anything tries to reach the API server, whose address
every pod knows; the result is kept with the policy.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from atoll.drivers.kubernetes.errors import NOT_FOUND, ignored, translated
from atoll.drivers.kubernetes.labels import PREFIX, Label, node_digest
from atoll.drivers.kubernetes.pod_manifest import PORT
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.drivers.kubernetes.api import ApiClient
    from atoll.drivers.kubernetes.pod_manifest import ImageFacts
    from atoll.drivers.kubernetes.pod_state import PodState
    from atoll.drivers.kubernetes.probe_pods import ProbePods

NAMESPACE_NAME = "kubernetes.io/metadata.name"
"""Label that each namespace has."""
ENFORCED = f"{PREFIX}/enforced"
"""Annotation of the policy: `true` or `false`, as measured."""
MEASURED_AT = f"{PREFIX}/measured-at"
"""Annotation: when, in seconds since 1970."""
MEASURE_INTERVAL = 86_400.0
"""Seconds after which it is measured again: the network may be another one."""
APPLY_INTERVAL = 60.0
"""Seconds for which the policy is taken to be as it was made."""
ATTEMPTS = 5
"""Connections that must fail: a policy takes effect a moment after its pod has started."""
PROBE_TIMEOUT = 120.0
RETRY_INTERVAL = 30.0
"""Seconds for which a failed measurement is not repeated."""
BLOCKED, OPEN = 40, 41
PROGRAM = """
import os, socket, time
address = os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])
refused = 0
for attempt in range(40):
    try:
        socket.create_connection(address, 2).close()
        refused = 0
    except OSError:
        refused += 1
        if refused == ATTEMPTS:
            os._exit(BLOCKED)
    time.sleep(0.5)
os._exit(OPEN)
"""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ControlPlanePods:
    """Where connections to executors come from."""

    labels: dict[str, str]
    namespace: str | None
    """Null if Atoll runs outside of the cluster."""
    addresses: tuple[str, ...] = ()
    """Ranges of addresses outside of the cluster."""


def policy(
    name: str, labels: dict[str, str], control_plane: ControlPlanePods | None
) -> dict[str, Any]:
    """
    Denies the pods with these labels everything but connections from the control plane to the
    executor; null if the API server forwards those.
    """
    ingress = []
    if control_plane is not None:
        peers: list[dict[str, Any]] = [
            {"ipBlock": {"cidr": cidr}} for cidr in control_plane.addresses
        ]
        if control_plane.namespace is not None:
            namespace = {"matchLabels": {NAMESPACE_NAME: control_plane.namespace}}
            pods = {"matchLabels": control_plane.labels}
            peers.append({"namespaceSelector": namespace, "podSelector": pods})
        if peers:  # A rule without peers would admit everything.
            ingress = [{"from": peers, "ports": [{"protocol": "TCP", "port": PORT}]}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "podSelector": {
                "matchLabels": labels,
                "matchExpressions": [{"key": Label.OPEN, "operator": "DoesNotExist"}],
            },
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": [],
        },
    }


class NotMeasured(TemporaryError):
    code = "network_policy_not_measured"


class NetworkPolicies:
    def __init__(
        self,
        api: ApiClient,
        namespace: str,
        probes: ProbePods,
        labels: dict[str, str],
        control_plane: ControlPlanePods | None,
    ) -> None:
        self._api = api
        self._probes = probes
        self._labels = labels
        self._control_plane = control_plane
        group = f"/apis/networking.k8s.io/v1/namespaces/{namespace}"
        self._path = f"{group}/networkpolicies/atoll-{node_digest(labels)}"
        self._applied_at = 0.0
        self.enforced: bool | None = None
        """Whether the cluster enforces the policy; null until that was measured."""
        self._measuring: asyncio.Task[None] | None = None
        self._measured_at = 0.0

    async def ensure(self) -> None:
        """Make the policy again if it was removed or changed, at most once a minute."""
        if time.monotonic() - self._applied_at > APPLY_INTERVAL:
            await self.open()

    async def open(self) -> None:
        """Make or update the policy, and read what was measured."""
        self._applied_at = time.monotonic()
        name = self._path.rpartition("/")[2]
        manifest = policy(name, self._labels, self._control_plane)
        with translated():
            made = await self._api.apply(self._path, manifest)
        annotations = made["metadata"].get("annotations") or {}
        measured_at = float(annotations.get(MEASURED_AT) or 0)
        valid = ENFORCED in annotations and time.time() - measured_at < MEASURE_INTERVAL
        self.enforced = annotations[ENFORCED] == "true" if valid else None

    async def remove(self) -> None:
        with translated(), ignored(NOT_FOUND):
            await self._api.delete(self._path)

    async def ensure_measured(self, image: Callable[[], Awaitable[ImageFacts]]) -> bool:
        """
        Whether the cluster enforces the policy; measured with pods of this image, which must be
        one that the operator trusts. Callers share one measurement, and its failure for a while.
        """
        if self.enforced is None:
            if self._measuring is None or self._has_failed():
                self._measuring = asyncio.create_task(self._measure(image), name="measure network")
                self._measured_at = time.monotonic()
            await asyncio.shield(self._measuring)
        assert self.enforced is not None
        return self.enforced

    def _has_failed(self) -> bool:
        """Whether the measurement has ended without a result some time ago."""
        assert self._measuring is not None
        over = self._measuring.done() and self.enforced is None
        return over and time.monotonic() - self._measured_at > RETRY_INTERVAL

    async def close(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.wait([self._measuring])

    async def _measure(self, image: Callable[[], Awaitable[ImageFacts]]) -> None:
        facts = await image()
        # First without the policy: if that pod cannot connect either, the failure proves nothing.
        if not await self._can_connect(facts, {Label.OPEN: "probe"}):
            raise NotMeasured(
                f"Even a pod that Atoll's network policy does not select (label {Label.OPEN}) "
                "cannot connect to the API server. Allow that, or repair the network of the "
                "machine."
            )
        enforced = not await self._can_connect(facts, {})
        result = {ENFORCED: str(enforced).lower(), MEASURED_AT: str(int(time.time()))}
        with translated():
            await self._api.patch(self._path, {"metadata": {"annotations": result}})
        log.info("network_policy.measured", enforced=enforced)
        self.enforced = enforced

    async def _can_connect(self, image: ImageFacts, labels: dict[str, str]) -> bool:
        constants = f"ATTEMPTS, BLOCKED, OPEN = {ATTEMPTS}, {BLOCKED}, {OPEN}\n"
        request = self._probes.request(
            constants + PROGRAM, image, timeout=PROBE_TIMEOUT,
            labels={Label.PROBE: "network", **labels},
        )  # fmt: skip
        try:
            pod = await self._probes.run(request, _is_over, timeout=PROBE_TIMEOUT)
        except TimeoutError:
            raise NotMeasured(
                "The pod that measures whether network policies are enforced did not end in time."
            ) from None
        if pod is None or pod.exit_code not in (BLOCKED, OPEN):
            raise NotMeasured(
                "The pod that measures whether network policies are enforced failed: "
                f"{pod.exit_message if pod is not None else 'it was removed'}"
            )
        return pod.exit_code == OPEN


def _is_over(pod: PodState | None) -> bool:
    return pod is None or pod.ended
