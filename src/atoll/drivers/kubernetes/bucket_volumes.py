"""
Directories of the bucket in pods: volumes of the kind `s3`, and workspaces that are mounted.

Atoll mounts nothing here. The operator makes one persistent volume claim whose volume is the
bucket, which a CSI driver mounts on the machines; a pod has the directories of its own volumes
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from atoll.drivers.base import NotEmptied
from atoll.drivers.kubernetes.labels import Annotation
from atoll.drivers.kubernetes.pod_manifest import WORKSPACE, PodVolume
from atoll.errors import BackendUnavailable, Conflict, InvalidRequest, TemporaryError
from atoll.model.volume import S3

if TYPE_CHECKING:
    from atoll.drivers.kubernetes.instance_pods import InstancePods
    from atoll.drivers.kubernetes.pod_state import PodState
    from atoll.model.instance import InstanceSpec
    from atoll.model.volume import Volume

NAME = "bucket"
"""Of the volume in a pod."""
MARKER = ".tmp/.atoll-directory"
"""
An empty object in each directory. Without it, the kubelet would have to make the directory, with a
mode, which many drivers cannot set. Executors leave `.tmp` out of lists of a workspace.
"""


class Objects(Protocol):
    """The part of the blob store that is used here."""

    async def put(self, key: str, data: bytes) -> None: ...

    async def remove_all(self, prefix: str, *, deferrable: bool = True) -> None: ...


@dataclass(frozen=True)
class BucketDirectory:
    """Where the blob store is in its bucket."""

    path: str
    """Empty for the bucket itself."""
    blobs: Objects
    """Writes and removes objects below it."""


class BucketVolumes:
    def __init__(self, claim: str, directory: BucketDirectory, pods: InstancePods) -> None:
        self._claim = claim
        self._directory = directory
        self._pods = pods

    def bucket_problem(self) -> str | None:
        return None

    async def make(self, volume: Volume) -> None:
        _require_bucket(volume)
        await self.discard(_prefix(volume))

    async def check(self, volume: Volume, *, read_only: bool) -> None:
        _require_bucket(volume)

    async def check_unused(self, volume: Volume) -> None:
        for pod in await self._pods.all():
            if volume.id in pod.annotations.get(Annotation.VOLUMES, "").split(","):
                raise Conflict(
                    f"Instance {pod.instance_id} still has volume {volume.id}. Retry in a few "
                    "seconds.",
                    code="volume_in_use",
                )

    async def remove(self, volume: Volume) -> None:
        await self.check_unused(volume)
        await self.discard(_prefix(volume))

    async def broken(self) -> list[str]:
        # Only the cluster knows the state of its mounts.
        return []

    async def discard(self, prefix: str) -> None:
        try:
            await self._directory.blobs.remove_all(f"{prefix}/", deferrable=False)
        except TemporaryError as error:
            if isinstance(error, BackendUnavailable):
                raise
            raise NotEmptied(
                f"{prefix} has objects whose names cannot be listed: {error.message} Remove them "
                "with a tool of the S3 server."
            ) from error

    async def of(self, spec: InstanceSpec) -> PodVolume:
        """What the pod of an instance mounts; raises `InvalidRequest` if it cannot."""
        mounts = []
        annotations: dict[str, str] = {}
        if spec.prefix is not None:
            mounts.append(await self._mount(spec.prefix, WORKSPACE))
            annotations[Annotation.MOUNTED] = spec.prefix
        for volume, mount in spec.volumes:
            _require_bucket(volume)
            mounts.append(await self._mount(_prefix(volume), mount.path, read_only=mount.read_only))
        if spec.volumes:
            annotations[Annotation.VOLUMES] = ",".join(volume.id for volume, _ in spec.volumes)
        claim = {"name": NAME, "persistentVolumeClaim": {"claimName": self._claim}}
        return PodVolume((claim,), tuple(mounts), annotations)

    async def _mount(self, prefix: str, path: str, *, read_only: bool = False) -> dict[str, Any]:
        await self._directory.blobs.put(f"{prefix}/{MARKER}", b"")
        directory = f"{self._directory.path}/{prefix}".strip("/")
        # Of the volume only this directory is in the pod.
        return {"name": NAME, "mountPath": path, "subPath": directory, "readOnly": read_only}


def is_mounting(pod: PodState) -> bool:
    """Whether a pod has directories of the bucket, which other pods may have too."""
    return Annotation.MOUNTED in pod.annotations or Annotation.VOLUMES in pod.annotations


def _prefix(volume: Volume) -> str:
    return f"volumes/{volume.id}"


def _require_bucket(volume: Volume) -> None:
    if volume.kind != S3:
        raise InvalidRequest(
            f"Volume {volume.id} would be on the disk of a node, and this node is a cluster. Make "
            "a volume of the kind s3.",
            code="isolation_unavailable",
            field="kind",
        )
