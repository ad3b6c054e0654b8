"""
Workspaces of a cluster: directories of pods, or persistent volume claims.

A directory ends with its pod, so it is neither listed, copied nor discarded, and what is to outlive
the pod is in a checkpoint. A claim stays until it is discarded, and moves with the session to
another machine as far as its storage class can do that. Its files belong to a uid that is recorded
with the claim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from atoll import ids
from atoll.drivers.base import Workspaces
from atoll.drivers.kubernetes.errors import NOT_FOUND, ApiError, ignored, translated
from atoll.drivers.kubernetes.labels import Annotation, Label, selector
from atoll.drivers.kubernetes.pod_manifest import DISK_MARGIN, WORKSPACE_VOLUME
from atoll.drivers.shared.uids import new_uid
from atoll.errors import WorkspaceLost

if TYPE_CHECKING:
    from atoll.drivers.kubernetes.api import ApiClient
    from atoll.model.instance import Handle, InstanceSpec
    from atoll.settings import KubernetesSettings


@dataclass(frozen=True)
class InstanceFiles:
    """The workspace that a pod is made with."""

    workspace: str
    uid: int
    """The user that owns the files and runs everything in the pod."""
    volume: dict[str, Any] | None = None
    """Null for a directory of the pod."""


class KubernetesWorkspaces(Workspaces, Protocol):
    async def provide(self, spec: InstanceSpec) -> InstanceFiles:
        """
        The workspace of an instance, which is made if the spec names none. Raises `WorkspaceLost`
        if the one that it names does not exist.
        """


class PodDirectories:
    can_copy = False
    outlive_instances = False

    def __init__(self, uids: range) -> None:
        self._uids = uids

    async def provide(self, spec: InstanceSpec) -> InstanceFiles:
        if spec.workspace not in (None, spec.instance_id):
            raise WorkspaceLost(
                f"Workspace {spec.workspace} ended with its pod. It continues from its last "
                "checkpoint."
            )
        return InstanceFiles(spec.instance_id, new_uid(self._uids))

    def of(self, handle: Handle) -> str:
        return str(handle.data["workspace"])

    async def names(self) -> list[str]:
        return []

    async def copy(self, name: str, new: str) -> bool:
        return False

    async def discard(self, name: str) -> None: ...


class VolumeClaims:
    can_copy = False
    outlive_instances = True

    def __init__(
        self,
        api: ApiClient,
        path: str,
        settings: KubernetesSettings,
        labels: dict[str, str],
        uids: range,
    ) -> None:
        """`path` is that of the namespace's claims; `labels` are those of the node."""
        self._api = api
        self._path = path
        self._settings = settings
        self._labels = labels
        self._uids = uids

    async def provide(self, spec: InstanceSpec) -> InstanceFiles:
        name = spec.workspace or spec.instance_id
        with translated():
            found = await self._find(name)
            if found is None and spec.workspace is not None:
                raise WorkspaceLost(f"Workspace {name} is not in this cluster.")
            if found is None:
                found = await self._make(name, spec.resources.disk)
        claim = {"claimName": found["metadata"]["name"]}
        return InstanceFiles(
            name,
            int(found["metadata"]["annotations"][Annotation.UID]),
            {"name": WORKSPACE_VOLUME, "persistentVolumeClaim": claim},
        )

    async def _find(self, name: str) -> dict[str, Any] | None:
        try:
            found = await self._api.get(f"{self._path}/{ids.cluster_object_name(name)}")
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        ends = "deletionTimestamp" in found["metadata"]
        return None if ends else found

    async def _make(self, name: str, disk: int) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "accessModes": [self._settings.access_mode],
            "resources": {"requests": {"storage": str(disk + DISK_MARGIN)}},
        }
        if self._settings.storage_class:
            spec["storageClassName"] = self._settings.storage_class
        manifest = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {
                "name": ids.cluster_object_name(name),
                "labels": {**self._labels, Label.WORKSPACE: name},
                "annotations": {Annotation.UID: str(new_uid(self._uids))},
            },
            "spec": spec,
        }
        return await self._api.apply(f"{self._path}/{ids.cluster_object_name(name)}", manifest)

    def of(self, handle: Handle) -> str:
        return str(handle.data["workspace"])

    async def names(self) -> list[str]:
        labels = {**self._labels, Label.WORKSPACE: ""}
        with translated():
            found = await self._api.get(self._path, labelSelector=selector(labels))
        return sorted(
            item["metadata"]["labels"][Label.WORKSPACE]
            for item in found["items"]
            if "deletionTimestamp" not in item["metadata"]
        )

    async def copy(self, name: str, new: str) -> bool:
        return False

    async def discard(self, name: str) -> None:
        with translated(), ignored(NOT_FOUND):
            await self._api.delete(f"{self._path}/{ids.cluster_object_name(name)}")
