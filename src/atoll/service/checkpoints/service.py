"""
Takes, verifies, restores, reads and removes checkpoints.

Only one checkpoint of a session is taken at a time, by any replica. The session's record names the
newest checkpoint and the older ones that are kept: the previous one, which may be in use by a
reader, and the configured number of settled ones. They share objects. A checkpoint is not settled
if a file changed while it was read, or code ran meanwhile; a later one replaces it once the session
is idle. A restore uses the newest checkpoint that is complete. After its session has ended, the
checkpoints are kept for a while so that files can still be downloaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING

import structlog

from atoll.errors import (
    AlreadyExists,
    BlobsUnavailable,
    CheckpointNotFound,
    NodeUnreachable,
    PermanentError,
    TemporaryError,
    TooLarge,
    VersionConflict,
)
from atoll.model.checkpoint import Checkpoint, CheckpointRef, retained
from atoll.model.manifest import MAX_FILE_SIZE, MAX_MANIFEST, Entry, Manifest, spans
from atoll.service.checkpoints.chunks import ChunkStore, manifest_of, prefix_of, stored_manifest
from atoll.service.checkpoints.restore import Restore
from atoll.service.checkpoints.verification import Verification
from atoll.service.checkpoints.writer import CheckpointWriter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from datetime import datetime

    from atoll.blobs.base import Blobs
    from atoll.coordination.leases import Lease
    from atoll.link.client import Link
    from atoll.service.replica import Replica
    from atoll.service.volumes.service import Volumes

log = structlog.get_logger(__name__)

CONCURRENCY = 2
"""
Checkpoints that this process takes at the same time, and the same number that it restores: slow
checkpoints do not delay restores. Each needs up to 64 MiB.
"""
NO_CHECKPOINT = 0
"""Number in a record that names no checkpoint."""
HOLE_PIECE = 1 << 20
"""Bytes of a hole that are sent at once."""
RESTORE_TIMEOUT = 7200.0
"""Seconds. A slow executor would otherwise block the restores of other sessions."""
MAX_RESTARTS = 5
"""Newer checkpoints that may appear during a restore; each may remove objects of older ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    backup: CheckpointRef
    older: bool
    """Whether it is not the newest checkpoint, because that one is damaged."""


def lease_of(session_id: str) -> str:
    """Name of the lease for changes of what a session has in the blob store."""
    return f"checkpoint:{session_id}"


class Checkpoints:
    def __init__(
        self,
        replica: Replica,
        blobs: Blobs,
        volumes: Volumes,
        *,
        backups: int = 2,
    ) -> None:
        """`backups` is the number of settled checkpoints that are kept at least."""
        self._store = replica.store
        self._leases = replica.leases
        self._clock = replica.clock
        self._node_id = replica.node_id
        self._blobs = blobs
        self._volumes = volumes
        self._backups = backups
        self._taking = asyncio.Semaphore(CONCURRENCY)
        self._restoring = asyncio.Semaphore(CONCURRENCY)

    # Taking

    async def take(
        self,
        session_id: str,
        link: Link,
        *,
        quiet: Callable[[], bool] = lambda: True,
        empty: bool = False,
    ) -> Checkpoint | None:
        """
        Take a checkpoint of the workspace. Returns null for an empty workspace without an earlier
        checkpoint, unless `empty` has that recorded too. `quiet` is called at the end, and returns
        whether no code ran meanwhile.
        """
        # The semaphore last: calls that queue for one session must not block other sessions. The
        # lease tells the sweep that the instance is still needed.
        async with self._lease(session_id) as lease, self._taking:
            before = await self._store.checkpoints.get(session_id)
            began = self._clock.monotonic()
            writer, base, lost = await self._write(session_id, link, before)
            if before is not None and lost:
                before = dataclasses.replace(before, damaged=True)
            if before is None and not writer.entries and not empty:
                return None
            if before is not None and base is not None and not writer.changed:
                return await self._unchanged(before, writer.settled and quiet())
            last = await self._record(session_id, before, base, writer, quiet())
            if before is not None:
                await self._clean(lease, before, base, *last, writer.unused)
            log.info(
                "checkpoint.taken",
                session_id=session_id,
                number=last[0].number,
                files=writer.files,
                size=writer.size,
                stored=writer.stored,
                took_ms=round((self._clock.monotonic() - began) * 1000),
            )
            return last[0]

    def _lease(self, session_id: str) -> Lease:
        # An owner per call: the same owner would be admitted twice.
        return self._leases.lease(lease_of(session_id), self._leases.new_owner())

    async def _write(
        self, session_id: str, link: Link, before: Checkpoint | None
    ) -> tuple[CheckpointWriter, Manifest | None, bool]:
        """
        Write a checkpoint. Also returns the manifest on which it is based, if any, and whether the
        previous checkpoint is lost.
        """
        lost = False
        objects = ChunkStore(self._blobs, session_id)
        if before is not None and not before.damaged:
            try:
                manifest = await self._manifest(session_id, before.backups[0])
                writer = CheckpointWriter(link, objects, manifest)
                await writer.run()
                return writer, manifest, False
            except PermanentError as error:
                # A damaged checkpoint is replaced by a complete new one.
                lost = True
                log.error("checkpoint.lost", session_id=session_id, error=error.message)
            except BlobsUnavailable as error:
                # The store cannot be read, but writes are spooled on the node's disk: store
                # everything once. The next checkpoint can be based on that.
                log.info("checkpoint.complete_copy", session_id=session_id, error=error.message)
            objects = ChunkStore(self._blobs, session_id)
        writer = CheckpointWriter(link, objects, None)
        await writer.run()
        return writer, None, lost

    async def _unchanged(self, before: Checkpoint, settled: bool) -> Checkpoint:
        if before.settled or not settled:
            return before
        # Nothing has changed since, so the content is that of an idle workspace.
        try:
            return await self._store.checkpoints.save(dataclasses.replace(before, settled=True))
        except VersionConflict:
            return before

    async def _record(
        self,
        session_id: str,
        before: Checkpoint | None,
        base: Manifest | None,
        writer: CheckpointWriter,
        quiet: bool,
    ) -> tuple[Checkpoint, Manifest]:
        await self._check_here(session_id)
        number = 1 if before is None else before.number + 1
        now = self._clock.now()
        manifest = writer.manifest(session_id, number, now.isoformat(), quiet)
        data = manifest.encoded()
        if len(data) > MAX_MANIFEST:
            raise TooLarge(
                f"The workspace of session {session_id} has too many large files for a checkpoint: "
                f"its manifest is larger than {MAX_MANIFEST} bytes.",
                code="checkpoint_too_large",
            )
        key = await asyncio.to_thread(manifest_of, session_id, number, data)
        await self._blobs.put(key, data)
        checkpoint = Checkpoint(
            id=session_id,
            number=number,
            manifest=key,
            created_at=now,
            files=writer.files,
            # Holes count, so user code can exceed the range of a database integer.
            size=min(writer.size, MAX_FILE_SIZE),
            node_id=self._node_id,
            settled=manifest.settled,
        )
        if before is None:
            await self._store.checkpoints.add(checkpoint)
            return checkpoint, manifest
        usable = before.older if before.damaged else before.backups
        checkpoint = dataclasses.replace(
            checkpoint,
            kept_until=before.kept_until,
            version=before.version,
            older=retained(usable, settled=manifest.settled, backups=self._backups),
        )
        return await self._store.checkpoints.save(checkpoint), manifest

    async def _check_here(self, session_id: str) -> None:
        """
        Refuse a session that has moved: the files that it left on this node may be older than those
        that it has changed on its new node.
        """
        session = await self._store.sessions.get(session_id)
        if session is not None and session.runtime_node != self._node_id:
            raise NodeUnreachable(
                f"Session {session_id} has moved to node {session.runtime_node}.",
            )

    async def _clean(
        self,
        lease: Lease,
        before: Checkpoint,
        base: Manifest | None,
        last: Checkpoint,
        manifest: Manifest,
        unused: set[str],
    ) -> None:
        """
        Remove objects that no kept checkpoint uses. While the store is unavailable this does
        nothing: the sweep of orphaned blobs removes them later.
        """
        kept = {one.manifest for one in last.backups}
        dropped = [one for one in before.backups if one.manifest not in kept]
        try:
            used, unused = manifest.names, set(unused)
            for one in last.older:
                known = base if one.manifest == before.manifest else None
                used |= (known or await self._manifest(last.id, one)).names
            for one in dropped:
                with contextlib.suppress(PermanentError):
                    unused |= (await self._manifest(last.id, one)).names
            lease.check()
            await ChunkStore(self._blobs, last.id).remove(unused - used)
            for one in dropped:
                await self._blobs.remove(one.manifest, deferrable=False)
        except (TemporaryError, PermanentError) as error:
            log.info("checkpoint.not_cleaned", session_id=last.id, error=error.message)

    # Verification

    async def is_synced(self, session_id: str) -> bool:
        """Whether no part of a session's checkpoints is still spooled on this node."""
        return await self._blobs.is_synced(prefix_of(session_id))

    async def verify(self, session_id: str) -> Checkpoint:
        """
        Read the last checkpoint completely, and return it. Raises `CheckpointDamaged` if something
        is missing or damaged, and `BlobsUnavailable` if a part is still spooled on this node or the
        store does not answer.
        """
        # Under the lease: a newer checkpoint would remove objects of this one.
        async with self._lease(session_id), self._restoring:
            checkpoint = await self._last(session_id)
            if not await self.is_synced(session_id):
                raise BlobsUnavailable(
                    f"Files of session {session_id} are not in the blob store yet.",
                )
            try:
                manifest = await self._manifest(session_id, checkpoint.backups[0])
                await Verification(self._blobs, session_id, manifest).run()
            except PermanentError:
                await self._mark_damaged(checkpoint)
                raise
            return checkpoint

    async def secure(self, session_id: str, link: Link) -> Checkpoint:
        """
        Take a checkpoint, of an empty workspace too, and verify it. If an earlier object turns out
        to be damaged, everything is stored again from the workspace, once.
        """
        await self.take(session_id, link, empty=True)
        try:
            return await self.verify(session_id)
        except PermanentError as error:
            log.warning("checkpoint.complete_copy", session_id=session_id, error=error.message)
        await self.take(session_id, link, empty=True)
        return await self.verify(session_id)

    async def _mark_damaged(self, checkpoint: Checkpoint) -> None:
        """Have the next checkpoint store everything again."""
        if not checkpoint.damaged:
            with contextlib.suppress(VersionConflict):  # There is a newer one.
                await self._store.checkpoints.save(dataclasses.replace(checkpoint, damaged=True))

    async def objects_of(self, checkpoint: Checkpoint) -> set[str]:
        """Names of all objects of a record's checkpoints; `PermanentError` if one is damaged."""
        names: set[str] = set()
        for one in checkpoint.backups:
            names |= (await self._manifest(checkpoint.id, one)).names
        return names

    # Reading and restoring

    async def get(self, session_id: str) -> Checkpoint | None:
        found = await self._store.checkpoints.get(session_id)
        return None if found is None or found.number == NO_CHECKPOINT else found

    async def _last(self, session_id: str) -> Checkpoint:
        checkpoint = await self.get(session_id)
        if checkpoint is None:
            raise CheckpointNotFound(f"Session {session_id} has no checkpoint.")
        return checkpoint

    async def restore(
        self, source: str, link: Link, replace: Callable[[], Awaitable[Link]]
    ) -> Restored:
        """
        Write the newest complete checkpoint of session `source` into the new workspace behind the
        link. A damaged checkpoint leaves an unusable workspace: then `replace` returns a link to
        another new one. Raises `PermanentError` if no checkpoint is complete.
        """
        async with self._restoring:
            try:
                async with asyncio.timeout(RESTORE_TIMEOUT):
                    return await self._restore_newest(source, link, replace)
            except TimeoutError:
                raise TemporaryError(
                    f"Restoring the files of session {source} took over {RESTORE_TIMEOUT:g} s.",
                    code="restore_timeout",
                ) from None

    async def _restore_newest(
        self, source: str, link: Link, replace: Callable[[], Awaitable[Link]]
    ) -> Restored:
        failed: PermanentError | None = None
        for _ in range(MAX_RESTARTS):
            last = await self._last(source)
            for backup in last.backups:
                older = backup.manifest != last.manifest
                if failed is not None:
                    link = await replace()
                try:
                    await self._restore(source, backup, link)
                except PermanentError as error:
                    failed = error
                    log.warning(
                        "checkpoint.not_restored",
                        session_id=source,
                        number=backup.number,
                        error=error.message,
                    )
                else:
                    if older:
                        await self._mark_damaged(last)
                    return Restored(backup, older=older)
                if (await self._last(source)).version != last.version:
                    break  # A newer checkpoint may have removed its objects.
            else:
                await self._mark_damaged(last)
                break
        assert failed is not None
        raise failed

    async def _restore(self, source: str, backup: CheckpointRef, link: Link) -> None:
        began = self._clock.monotonic()
        manifest = await self._manifest(source, backup)
        await Restore(link, ChunkStore(self._blobs, source), manifest).run()
        log.info(
            "checkpoint.restored",
            session_id=source,
            number=backup.number,
            files=backup.files,
            size=backup.size,
            took_ms=round((self._clock.monotonic() - began) * 1000),
        )

    async def _manifest(self, session_id: str, backup: CheckpointRef) -> Manifest:
        return await stored_manifest(self._blobs, session_id, backup.manifest)

    async def find(self, session_id: str, path: str) -> Entry | None:
        """The entry of a path in the last checkpoint."""
        checkpoint = await self.get(session_id)
        if checkpoint is None:
            return None
        manifest = await self._manifest(session_id, checkpoint.backups[0])
        page = manifest.page_of(path)
        if page is None:
            return None
        entries = await ChunkStore(self._blobs, session_id).page(page)
        return next((entry for entry in entries if entry.path == path), None)

    async def content(
        self, session_id: str, entry: Entry, start: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        """Content of a file in the last checkpoint."""
        objects = ChunkStore(self._blobs, session_id)
        for part in spans(entry.parts, start, entry.size if end is None else end):
            if part.object is None:
                for offset in range(0, part.length, HOLE_PIECE):
                    yield bytes(min(HOLE_PIECE, part.length - offset))
            else:
                yield await objects.part(part)

    async def entries(self, session_id: str, start: str = "") -> AsyncIterator[Entry]:
        """
        Entries of the last checkpoint in order of path, beginning with the page that has `start`;
        all entries if that is empty.
        """
        checkpoint = await self.get(session_id)
        if checkpoint is None:
            return
        objects = ChunkStore(self._blobs, session_id)
        for page in (await self._manifest(session_id, checkpoint.backups[0])).pages_from(start):
            for entry in await objects.page(page):
                yield entry

    # Removal

    async def keep_until(self, session_id: str, moment: datetime, *, mounted: bool) -> None:
        """
        Set the time at which the data of an ended session is removed from the blob store. A session
        with a mounted workspace has no checkpoint, so its record has the time alone.
        """
        found = await self._store.checkpoints.get(session_id)
        if found is not None and found.kept_until is None:
            await self._store.checkpoints.save(dataclasses.replace(found, kept_until=moment))
        elif found is None and mounted:
            now = self._clock.now()
            record = Checkpoint(session_id, NO_CHECKPOINT, "", now, 0, 0, self._node_id, moment)
            with contextlib.suppress(AlreadyExists):  # Another sweep was faster.
                await self._store.checkpoints.add(record)

    async def forget(self, session_id: str) -> None:
        """
        Remove everything that the session has in the blob store. The record is removed last, so
        that an interrupted removal is repeated.
        """
        for kind in ("workspaces", "exports", "uploads"):
            await self._blobs.remove_all(f"{kind}/{session_id}/")
        session = await self._store.sessions.get(session_id)
        if session is not None:
            await self._volumes.discard_mounted(session)
        await self._store.checkpoints.remove(session_id)
