"""Pods without Atoll: created, watched and executed in over the API, as kubectl does it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import aiohttp
from tests.servers.kubernetes.images import PYTHON

from atoll.drivers.kubernetes import access
from atoll.drivers.kubernetes.api import ApiClient
from atoll.drivers.kubernetes.errors import NOT_FOUND, ignored
from atoll.settings import KubernetesSettings
from bench.cluster_setup import NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

CODE = "print(1)"
PATH = f"/api/v1/namespaces/{NAMESPACE}"
STATUS = 3
"""Channel of an exec that ends it."""
PATIENCE = timedelta(seconds=120)


class PlainPods:
    """Its methods block; the requests are made in an event loop of its own."""

    def __init__(self, kubeconfig: Path) -> None:
        self._access = access.from_kubeconfig(kubeconfig, "")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._numbers = itertools.count()

    def __enter__(self) -> Self:
        self._thread.start()
        self._api = ApiClient(self._access, KubernetesSettings(timeout=PATIENCE))
        self._call(self._api.open())
        return self

    def __exit__(self, *error: object) -> None:
        self._call(self._api.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(600)

    # Pods

    def start(self) -> str:
        """The name of a new pod that runs."""
        return str(self._call(self._start()))

    def execute(self, pod: str) -> None:
        self._call(self._execute(pod))

    def remove(self, *pods: str) -> None:
        self._call(self._remove(pods))

    def run(self) -> str:
        """Start a pod and execute in it; its name."""
        pod = self.start()
        self.execute(pod)
        return pod

    def run_at_once(self, count: int) -> tuple[list[float], float]:
        """The same so often at the same time: milliseconds of each, and seconds of all."""
        return tuple(self._call(self._run_at_once(count)))

    def writes(self, count: int, at_once: int) -> tuple[list[float], float]:
        """Create so many small config maps: milliseconds of each, and seconds of all."""
        return tuple(self._call(self._writes(count, at_once)))

    async def _start(self) -> str:
        name = f"plain-{next(self._numbers)}"
        created = await self._api.request("POST", f"{PATH}/pods", _manifest(name))
        events = self._api.watch(
            f"{PATH}/pods",
            fieldSelector=f"metadata.name={name}",
            resourceVersion=created["metadata"]["resourceVersion"],
        )
        async with contextlib.aclosing(events):
            async for event in events:
                pod = event.get("object", {})  # The first event says that the watch is open.
                if pod.get("status", {}).get("phase") == "Running":
                    return name
        raise RuntimeError(f"the watch of pod {name} ended")

    async def _execute(self, pod: str) -> None:
        words = ("python3", "-c", CODE)
        params = [*(("command", word) for word in words), ("stdout", "true"), ("stderr", "true")]
        stream = await self._api.stream(f"{PATH}/pods/{pod}/exec", params)
        output = b""
        async for message in stream:
            if message.type is aiohttp.WSMsgType.BINARY and message.data:
                if message.data[0] == STATUS:
                    break
                output += message.data[1:]
        await stream.close()
        if output.strip() != b"1":
            raise RuntimeError(f"exec in pod {pod}: {output[-300:]!r}")

    async def _remove(self, pods: tuple[str, ...]) -> None:
        for pod in pods:
            with ignored(NOT_FOUND):
                await self._api.delete(f"{PATH}/pods/{pod}", gracePeriodSeconds=0)

    async def _run_at_once(self, count: int) -> tuple[list[float], float]:
        async def one() -> tuple[str, float]:
            start = time.perf_counter()
            pod = await self._start()
            await self._execute(pod)
            return pod, (time.perf_counter() - start) * 1000

        begin = time.perf_counter()
        done = await asyncio.gather(*(one() for _ in range(count)))
        seconds = time.perf_counter() - begin
        await self._remove(tuple(pod for pod, _ in done))
        return [took for _, took in done], seconds

    async def _writes(self, count: int, at_once: int) -> tuple[list[float], float]:
        names = iter([f"write-{next(self._numbers)}" for _ in range(count)])
        values: list[float] = []

        async def work() -> None:
            for name in names:
                content = {"metadata": {"name": name, "labels": {"bench": "write"}}, "data": {}}
                start = time.perf_counter()
                await self._api.request("POST", f"{PATH}/configmaps", content)
                values.append((time.perf_counter() - start) * 1000)

        begin = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(at_once)))
        seconds = time.perf_counter() - begin
        await self._api.request(
            "DELETE", f"{PATH}/configmaps", params={"labelSelector": "bench=write"}
        )
        return values, seconds


def _manifest(name: str) -> dict[str, Any]:
    """With the limits of an instance of Atoll."""
    container = {
        "name": "python",
        "image": PYTHON,
        "command": ["sleep", "86400"],
        "resources": {
            "limits": {"cpu": "1", "memory": "560Mi"},
            "requests": {"cpu": "10m", "memory": "28Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
        },
    }
