"""
Volumes: directories that several sessions share.

A session's volumes are mounted in each of its instances. A volume on the disk of a node is for
sessions of that node; a volume in the bucket of the blob store is for all sessions. The record is
stored before the volume is made and removed before its files are, so a new volume never has the
files of an old one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from atoll.blobs.base import RefusedByStore, UnlistableNames
from atoll.drivers.base import NotEmptied
from atoll.errors import AlreadyExists, AtollError, Conflict, InvalidRequest, NotFound
from atoll.model.session import WorkspaceMode
from atoll.model.volume import LOCAL, S3, Volume
from atoll.stores.batches import by_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.blobs.base import Blobs
    from atoll.clock import Clock
    from atoll.drivers.base import Driver
    from atoll.drivers.base import Volumes as DriverVolumes
    from atoll.model.page import Page
    from atoll.model.session import Session
    from atoll.model.volume import VolumeMount
    from atoll.settings import SessionSettings
    from atoll.stores.base import Store


log = structlog.get_logger(__name__)


class Volumes:
    def __init__(
        self,
        store: Store,
        driver: Driver,
        blobs: Blobs,
        clock: Clock,
        settings: SessionSettings,
        node_id: str,
    ) -> None:
        self._store = store
        self._driver = driver
        self._blobs = blobs
        self._clock = clock
        self._settings = settings
        self._node_id = node_id

    async def create(self, volume_id: str, *, size: int | None, kind: str | None) -> Volume:
        problem = self._bucket_problem()
        if kind is None:
            kind = S3 if problem is None else LOCAL
        if kind == S3 and problem is not None:
            raise InvalidRequest(
                f"kind: this node cannot mount a bucket: {problem}.",
                code="mount_unavailable",
                field="kind",
            )
        if kind == S3 and size is not None:
            raise InvalidRequest("size: not available for a volume in the bucket.", field="size")
        if size is not None and size > (most := self._settings.max_disk):
            raise InvalidRequest(f"size: at most {most} bytes are allowed here.", field="size")
        volume = Volume(
            id=volume_id,
            created_at=self._clock.now(),
            size=0 if kind == S3 else size or self._settings.disk,
            kind=kind,
            node_id=None if kind == S3 else self._node_id,
        )
        try:
            await self._store.volumes.add(volume)
        except AlreadyExists:
            raise Conflict(f"Volume {volume_id} already exists.", code="volume_exists") from None
        try:
            await self._require(kind).make(volume)
        except BaseException:
            await self._store.volumes.remove(volume_id)
            raise
        return volume

    async def get(self, volume_id: str) -> Volume:
        volume = await self._store.volumes.get(volume_id)
        if volume is None:
            raise NotFound(f"There is no volume {volume_id}.", code="volume_not_found")
        return volume

    async def list(self, *, cursor: str | None, limit: int) -> Page[Volume]:
        return await self._store.volumes.page(cursor=cursor, limit=limit)

    async def remove(self, volume_id: str) -> None:
        volume = await self.get(volume_id)
        self._check_here(volume)
        await self._check_unused(volume_id)
        # No new session gets the volume from here on. One that just got it is found below.
        if not await self._store.volumes.remove(volume_id):
            raise NotFound(f"There is no volume {volume_id}.", code="volume_not_found")
        try:
            await self._check_unused(volume_id)
            # Instances of sessions that have just ended may still have it mounted.
            volumes = self._driver.volumes
            if volumes is not None:
                await volumes.check_unused(volume)
            if volume.kind == S3:
                # Not later: if the removal fails, the volume stays and keeps its files.
                await self._empty(f"volumes/{volume_id}", deferrable=False)
            if volumes is not None:
                await volumes.remove(volume)
        except AtollError:
            await self._store.volumes.add(volume)
            raise
        log.info("volume.removed", volume_id=volume_id)

    async def _check_unused(self, volume_id: str) -> None:
        async for session in by_id(self._store.sessions.unfinished):
            if any(mount.volume_id == volume_id for mount in session.volumes):
                raise Conflict(
                    f"Session {session.id} uses volume {volume_id}; end it first.",
                    code="volume_in_use",
                    session_id=session.id,
                )

    def _check_here(self, volume: Volume) -> None:
        if volume.node_id not in (None, self._node_id):
            raise Conflict(
                f"Volume {volume.id} is on the disk of node {volume.node_id}, not on that of "
                f"{self._node_id}.",
                code="volume_elsewhere",
                node_id=volume.node_id,
            )

    def _bucket_problem(self) -> str | None:
        """Why this node cannot mount the bucket; null if it can."""
        if self._driver.volumes is None:
            return self._driver.capabilities.unavailable["volumes"]
        return self._driver.volumes.bucket_problem()

    def _require(self, kind: str) -> DriverVolumes:
        """The driver's volumes; `InvalidRequest` if it has none."""
        if self._driver.volumes is None:
            reason = self._driver.capabilities.unavailable["volumes"]
            raise InvalidRequest(
                f"This node does not support volumes: {reason}.",
                code="mount_unavailable" if kind == S3 else "isolation_unavailable",
            )
        return self._driver.volumes

    # For sessions

    async def check(self, mounts: Sequence[VolumeMount], mode: WorkspaceMode) -> None:
        """Refuse volumes, or a workspace mode, that this node cannot provide."""
        if mode is WorkspaceMode.MOUNT and (problem := self._bucket_problem()) is not None:
            raise InvalidRequest(
                f"workspace_mode: this node cannot mount workspaces: {problem}.",
                code="mount_unavailable",
                field="workspace_mode",
            )
        _check_paths([mount.path for mount in mounts])
        for mount in mounts:
            volume = await self.get(mount.volume_id)
            self._check_here(volume)
            await self._require(volume.kind).check(volume, read_only=mount.read_only)

    async def discard_mounted(self, session: Session) -> None:
        """Remove the mounted workspace of an ended session."""
        prefix = session.mount_prefix
        if prefix is not None and session.status.ended:
            await self._empty(prefix, deferrable=True)
            if self._driver.volumes is None:
                return
            try:
                await self._driver.volumes.discard(prefix)
            except NotEmptied as error:
                # Code of the session chose these file names, so this must not block the sweep.
                log.error("workspace.not_emptied", session_id=session.id, error=error.message)

    async def _empty(self, prefix: str, *, deferrable: bool) -> None:
        """
        Remove blobs with ordinary keys in bulk, because removing them one by one takes long. The
        driver, which knows how a file system is stored in a bucket, removes the rest.
        """
        try:
            await self._blobs.remove_all(f"{prefix}/", deferrable=deferrable)
        except (UnlistableNames, RefusedByStore) as error:
            log.info("prefix.not_listed", prefix=prefix, error=error.message)


def _check_paths(paths: Sequence[str]) -> None:
    for number, path in enumerate(paths):
        for other in paths[:number]:
            if f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/"):
                raise InvalidRequest(
                    f"volumes: the paths {path} and {other} overlap.",
                    field="volumes",
                )
