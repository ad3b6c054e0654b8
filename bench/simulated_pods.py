"""
Pods that nobody runs: nodes that exist in the API alone, and a controller that marks what is
scheduled there as running. All of them have the address of one listener, which plays the executors:
it accepts links and answers what an idle session is asked.

To Atoll they are like real ones; what they cost it is what real ones would.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
import tempfile
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

from tests.servers.kubernetes import network
from tests.servers.kubernetes.images import PYTHON

from atoll import ids
from atoll.drivers.kubernetes import access, credentials, pod_manifest
from atoll.drivers.kubernetes.api import OPENED, ApiClient
from atoll.drivers.kubernetes.errors import CONFLICT, NOT_FOUND, ignored
from atoll.drivers.kubernetes.labels import Annotation, Label, value
from atoll.drivers.kubernetes.pod_manifest import ImageFacts, PodRequest
from atoll.drivers.kubernetes.pod_state import CONTAINER
from atoll.protocol import frames
from atoll.settings import KubernetesSettings
from bench.cluster_setup import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from atoll.model.resources import Resources

PODS_OF_NODE = 250
ADDRESSES = "10.250"
"""First half of the pods' addresses, which are local to the benchmark's network namespace."""
RENEWAL = 3.0
"""Seconds between two heartbeats of a node; the tests' cluster loses one after 12."""
AT_ONCE = 16
PATIENCE = 300.0
MARK = {"bench": "simulated"}
SETTINGS = KubernetesSettings(
    node_selector=MARK,
    tolerations=[{"key": "bench", "operator": "Exists"}],
    cpu_request=0.01,
    memory_request=0.01,
    timeout=timedelta(seconds=60),
)
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
HELLO = {"version": frames.VERSION, "features": [], "python": "3.11", "zygote": 2, "runs": []}
ANSWERS: dict[str, dict[str, Any]] = {"release": {"preload_failed": {}}, "edition": {}}


@dataclass(frozen=True)
class SimulatedPod:
    instance_id: str
    name: str
    uid: str
    certificate: str


class SimulatedPods:
    """Its methods block; the controller works in an event loop of its own."""

    def __init__(self, kubeconfig: Path, most: int) -> None:
        self._access = access.from_kubeconfig(kubeconfig, "")
        self._nodes = [f"simulated-{number}" for number in range(-(-most // PODS_OF_NODE))]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._key = credentials.make_key_pair("simulated")
        self._addresses = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self._running: set[str] = set()
        self._marked = asyncio.Event()
        """Set when `_running` has changed."""
        self.links: set[asyncio.StreamWriter] = set()
        """Connections of servers to executors."""

    def __enter__(self) -> Self:
        network.ip("route", "add", "local", f"{ADDRESSES}.0.0/16", "dev", "lo")
        self._thread.start()
        self._call(self._open())
        return self

    def __exit__(self, *error: object) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def create(self, count: int, cluster: str, resources: Resources) -> list[SimulatedPod]:
        """So many pods of instances of this database, when all of them run."""
        created: list[SimulatedPod] = self._call(self._create(count, cluster, resources))
        return created

    def remove_all(self) -> None:
        self._call(self._remove_all())

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(600)

    async def _open(self) -> None:
        self._api = ApiClient(self._access, SETTINGS)
        await self._api.open()
        self._server = await asyncio.start_server(
            self._serve, "0.0.0.0", pod_manifest.PORT, ssl=_tls(self._key.pem), backlog=4096
        )
        for name in self._nodes:
            await self._api.request("POST", "/api/v1/nodes", _node(name))
            lease = {
                "metadata": {"name": name},
                "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _now()},
            }
            await self._api.request("POST", LEASES, lease)
        self._tasks = [
            asyncio.create_task(self._renew(), name="renew leases"),
            asyncio.create_task(self._follow(), name="mark pods as running"),
        ]

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.close()
        for writer in list(self.links):
            writer.transport.abort()
        await self._api.close()

    # Nodes and pods

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEWAL)
            for name in self._nodes:
                with contextlib.suppress(Exception):
                    await self._api.patch(f"{LEASES}/{name}", {"spec": {"renewTime": _now()}})

    async def _follow(self) -> None:
        slots = asyncio.Semaphore(AT_ONCE)
        marked: set[str] = set()

        async def mark(name: str) -> None:
            number = next(self._addresses)
            address = f"{ADDRESSES}.{number // 250}.{number % 250 + 1}"
            async with slots:
                with ignored(NOT_FOUND):
                    await self._api.patch(f"{PODS}/{name}/status", {"status": _status(address)})
            self._running.add(name)
            self._marked.set()

        while True:
            events = self._api.watch(PODS, labelSelector=Label.INSTANCE)
            async with contextlib.aclosing(events):
                async for event in events:
                    if event["type"] == OPENED:
                        continue
                    pod = event["object"]
                    name = pod["metadata"].get("name")
                    on = pod.get("spec", {}).get("nodeName", "")
                    if event["type"] == "DELETED":
                        self._running.discard(name)
                        self._marked.set()
                    elif on in self._nodes and name not in marked:
                        marked.add(name)
                        asyncio.create_task(mark(name))  # noqa: RUF006 - its end is waited for

    async def _create(self, count: int, cluster: str, resources: Resources) -> list[SimulatedPod]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one() -> SimulatedPod:
            instance_id = ids.instance_id()
            request = _request(instance_id, cluster, resources, self._key.fingerprint)
            manifest = pod_manifest.pod(request, SETTINGS)
            async with slots, asyncio.timeout(60):
                made = (await self._api.request("POST", PODS, manifest))["metadata"]
            return SimulatedPod(instance_id, made["name"], made["uid"], self._key.fingerprint)

        created = await asyncio.gather(*(one() for _ in range(count)))
        async with asyncio.timeout(PATIENCE):
            while not {pod.name for pod in created} <= self._running:
                self._marked.clear()
                await self._marked.wait()
        return created

    async def _remove_all(self) -> None:
        params = {"labelSelector": Label.INSTANCE, "gracePeriodSeconds": "0"}
        with ignored(CONFLICT):
            await self._api.request("DELETE", PODS, params=params)
        async with asyncio.timeout(PATIENCE):
            while self._running:
                self._marked.clear()
                await self._marked.wait()

    # Executors

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.links.add(writer)
        decoder = frames.Decoder()
        try:
            while data := await reader.read(65_536):
                for stream, kind, payload in decoder.feed(data):
                    answer = None
                    if kind == frames.HELLO:
                        answer = frames.encode_json(0, frames.HELLO, HELLO)
                    elif kind == frames.OPEN:
                        op = frames.decode_json(payload)["op"]
                        if op in ANSWERS:
                            answer = frames.encode_json(stream, frames.END, ANSWERS[op])
                    if answer is not None:
                        writer.write(answer)
        except OSError:
            pass
        finally:
            self.links.discard(writer)
            writer.transport.abort()


def _request(instance_id: str, cluster: str, resources: Resources, certificate: str) -> PodRequest:
    image = ImageFacts(PYTHON, python="/usr/bin/python3")
    files = pod_manifest.executor_files(
        "atoll-executor-simulated", {"executor.pyz": "executor.pyz", "inside": "inside"}
    )
    return PodRequest(
        name=ids.cluster_object_name(instance_id),
        labels={
            Label.CLUSTER: value(cluster),
            Label.NODE: SETTINGS.node,
            Label.INSTANCE: instance_id,
            Label.TEMPLATE: "python",
        },
        annotations={
            Annotation.WORKSPACE: instance_id,
            Annotation.CERTIFICATE: certificate,
            Annotation.DISK: str(resources.disk),
        },
        image=image,
        resources=resources,
        uid=100_000,
        command=pod_manifest.executor_command(image),
        env=pod_manifest.executor_env(image),
        volumes=files.volumes,
        mounts=files.mounts,
        attached=True,
    )


def _node(name: str) -> dict[str, Any]:
    room = {"cpu": "1k", "memory": "4Ti", "pods": str(PODS_OF_NODE), "ephemeral-storage": "100Ti"}
    now = _now(microseconds=False)
    ready = {"lastHeartbeatTime": now, "lastTransitionTime": now, "reason": "KubeletReady"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**MARK, "kubernetes.io/hostname": name}},
        "spec": {"taints": [{"key": "bench", "value": "simulated", "effect": "NoSchedule"}]},
        "status": {
            "capacity": room,
            "allocatable": room,
            "conditions": [{"type": "Ready", "status": "True", **ready}],
        },
    }


def _status(address: str) -> dict[str, Any]:
    now = _now(microseconds=False)
    conditions = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    container = {
        "name": CONTAINER,
        "image": PYTHON,
        "imageID": "",
        "ready": True,
        "started": True,
        "restartCount": 0,
        "state": {"running": {"startedAt": now}},
    }
    return {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": now,
        "conditions": [
            {"type": name, "status": "True", "lastTransitionTime": now} for name in conditions
        ],
        "containerStatuses": [container],
    }


def _now(*, microseconds: bool = True) -> str:
    form = "%Y-%m-%dT%H:%M:%S.%fZ" if microseconds else "%Y-%m-%dT%H:%M:%SZ"
    return datetime.now(UTC).strftime(form)


def _tls(pem: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(file.name)
    return context
