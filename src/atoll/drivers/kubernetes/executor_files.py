"""
The executor and what user code may import, as an immutable config map that all pods mount.

It is named after its content: replicas of two versions of Atoll use one each. A config map needs no
registry and no start of another container, so any image with Python can host an executor.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from typing import TYPE_CHECKING, Any

from atoll.drivers.kubernetes.errors import CONFLICT, NOT_FOUND, ApiError, ignored
from atoll.drivers.kubernetes.labels import Annotation, Label, node_digest, selector
from atoll.drivers.shared import executor_bundle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.drivers.kubernetes.api import ApiClient
    from atoll.drivers.kubernetes.pod_state import PodState

EXECUTOR = "executor"
"""Value of `Label.SHARED`."""
BUNDLE = "executor.pyz"
CHECK_INTERVAL = 60.0
"""Seconds for which the config map is known to exist."""


class ExecutorFiles:
    def __init__(self, api: ApiClient, path: str, labels: dict[str, str]) -> None:
        """`path` is that of the namespace's config maps; `labels` are those of the node."""
        self._api = api
        self._path = path
        self._labels = labels
        self._checked_at = 0.0
        self.name = ""
        self.items: dict[str, str] = {}
        """Paths in a pod, by key."""

    async def open(self) -> None:
        manifest = await asyncio.to_thread(self._manifest)
        self.name = manifest["metadata"]["name"]
        with ignored(CONFLICT):
            await self._api.request("POST", self._path, manifest)
        self._checked_at = time.monotonic()

    async def ensure(self) -> None:
        """
        Make the config map again if a replica of another version has removed it, or a person. Looks
        at most once in `CHECK_INTERVAL`; the kubelet repeats a mount that fails.
        """
        if time.monotonic() - self._checked_at < CHECK_INTERVAL:
            return
        self._checked_at = time.monotonic()
        try:
            await self._api.get(f"{self._path}/{self.name}")
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            await self.open()

    async def remove_unused(self, pods: Iterable[PodState]) -> None:
        """
        Remove the config maps of other versions that no pod mounts. A replica of another version
        that still runs makes its own again (`ensure`).
        """
        used = {pod.annotations.get(Annotation.EXECUTOR) for pod in pods} | {self.name}
        labels = {**self._labels, Label.SHARED: EXECUTOR}
        found = await self._api.get(self._path, labelSelector=selector(labels))
        for item in found["items"]:
            name = item["metadata"]["name"]
            if name not in used:
                with ignored(NOT_FOUND):
                    await self._api.delete(f"{self._path}/{name}")

    def _manifest(self) -> dict[str, Any]:
        files = {f"inside/{path}": data for path, data in executor_bundle.inside().items()}
        files[BUNDLE] = executor_bundle.build(compressed=True)
        # A key of a config map has no slashes.
        keys = {path.replace("/", "."): path for path in sorted(files)}
        digest = hashlib.sha256()
        for path in keys.values():
            digest.update(f"{path} {len(files[path])} ".encode() + files[path])
        self.items = keys
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": f"atoll-executor-{digest.hexdigest()[:16]}-{node_digest(self._labels)}",
                "labels": {**self._labels, Label.SHARED: EXECUTOR},
            },
            "immutable": True,
            "binaryData": {
                key: base64.b64encode(files[path]).decode() for key, path in keys.items()
            },
        }
