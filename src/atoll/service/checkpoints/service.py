"""
Checkpoints: a session's workspace in the blob store.

One at a time is taken of a session, by whichever replica. The record names the newest and the older
ones that are kept: the one before, because somebody may be reading it, and as many settled ones as
are asked for. They share objects. A file that changes while it is read, or code that runs
meanwhile, makes a checkpoint that is not settled: a later one takes its place as soon as there is
quiet. A restore takes the newest that is whole. After its session has ended the last ones are kept
for a while, for whoever comes for the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING

import structlog

from atoll.errors import (
    BlobsUnavailable,
    CheckpointNotFound,
    Conflict,
    NodeUnreachable,
    PermanentError,
    TemporaryError,
    TooLarge,
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

AT_ONCE = 2
"""
Checkpoints that this process takes at the same time, and that it restores: whoever makes one that
takes long keeps nobody's files from coming back. Each needs up to 64 MiB.
"""
NONE = 0
"""The number of a record that names no checkpoint."""
ZEROS = 1 << 20
"""Bytes of a hole that are sent at once."""


RESTORE_SECONDS = 7200.0
"""
For a restore: an executor that takes a byte now and then would keep others' files from coming back.
"""
RESTORES = 5
"""Newer ones that are begun with while one is restored; each takes objects of older ones away."""


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    backup: CheckpointRef
    older: bool
    """Whether it is not the newest, of which something is missing or damaged."""


def lease_of(session_id: str) -> str:
    """Held by whoever changes what a session has in the blob store."""
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
        self._taking = asyncio.Semaphore(AT_ONCE)
        self._restoring = asyncio.Semaphore(AT_ONCE)

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
        What the workspace holds now; None when that is nothing and there was nothing before, unless
        `empty` has that recorded too. `quiet` is asked at the end whether nothing ran meanwhile.
        """
        # The slot last: those in line for one session keep none from others, and by the lease a
        # sweep sees that the instance is still needed.
        async with self._alone(session_id) as lease, self._taking:
            before = await self._store.checkpoints.get(session_id)
            began = self._clock.monotonic()
            capture, base, lost = await self._captured(session_id, link, before)
            if before is not None and lost:
                before = dataclasses.replace(before, damaged=True)
            if before is None and not capture.entries and not empty:
                return None
            if before is not None and base is not None and not capture.changed:
                return await self._unchanged(before, capture.settled and quiet())
            last = await self._recorded(session_id, before, base, capture, quiet())
            if before is not None:
                await self._clean(lease, before, base, *last, capture.stray)
            log.info(
                "checkpoint.taken",
                session_id=session_id,
                number=last[0].number,
                files=capture.files,
                size=capture.size,
                stored=capture.stored,
                took_ms=round((self._clock.monotonic() - began) * 1000),
            )
            return last[0]

    def _alone(self, session_id: str) -> Lease:
        # Of this call alone: the same owner would be let in twice.
        return self._leases.lease(lease_of(session_id), self._leases.new_owner())

    async def _captured(
        self, session_id: str, link: Link, before: Checkpoint | None
    ) -> tuple[CheckpointWriter, Manifest | None, bool]:
        """With the manifest that it builds on, if it does, and whether the one before is lost."""
        lost = False
        objects = ChunkStore(self._blobs, session_id)
        if before is not None and not before.damaged:
            try:
                manifest = await self._manifest(session_id, before.backups[0])
                capture = CheckpointWriter(link, objects, manifest)
                await capture.run()
                return capture, manifest, False
            except PermanentError as error:
                # One that is lost is no reason not to take another.
                lost = True
                log.error("checkpoint.lost", session_id=session_id, error=error.message)
            except BlobsUnavailable as error:
                # What the store has of it cannot be asked, but what is put waits on the node's
                # disk: all of it, once. The next one can build on that.
                log.info("checkpoint.anew", session_id=session_id, error=error.message)
            objects = ChunkStore(self._blobs, session_id)
        capture = CheckpointWriter(link, objects, None)
        await capture.run()
        return capture, None, lost

    async def _unchanged(self, before: Checkpoint, settled: bool) -> Checkpoint:
        if before.settled or not settled:
            return before
        # What was written while code ran is what is there in quiet too.
        try:
            return await self._store.checkpoints.save(dataclasses.replace(before, settled=True))
        except Conflict:
            return before

    async def _recorded(
        self,
        session_id: str,
        before: Checkpoint | None,
        base: Manifest | None,
        capture: CheckpointWriter,
        quiet: bool,
    ) -> tuple[Checkpoint, Manifest]:
        await self._check_here(session_id)
        number = 1 if before is None else before.number + 1
        now = self._clock.now()
        manifest = capture.manifest(session_id, number, now.isoformat(), quiet)
        data = manifest.encoded()
        if len(data) > MAX_MANIFEST:
            raise TooLarge(
                f"The workspace of session {session_id} has too many large files to be saved: "
                f"their list has more than {MAX_MANIFEST} bytes.",
                code="checkpoint_too_large",
            )
        key = await asyncio.to_thread(manifest_of, session_id, number, data)
        await self._blobs.put(key, data)
        checkpoint = Checkpoint(
            id=session_id,
            number=number,
            manifest=key,
            created_at=now,
            files=capture.files,
            # Holes count, so user code can make it larger than a database's numbers are.
            size=min(capture.size, MAX_FILE_SIZE),
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
        Files that a session left behind on this node are not its files any more: it may have gone
        on elsewhere with those that were saved before.
        """
        session = await self._store.sessions.get(session_id)
        if session is not None and session.runtime_node != self._node_id:
            raise NodeUnreachable(
                f"Session {session_id} is on node {session.runtime_node} now.",
            )

    async def _clean(
        self,
        lease: Lease,
        before: Checkpoint,
        base: Manifest | None,
        last: Checkpoint,
        manifest: Manifest,
        stray: set[str],
    ) -> None:
        """
        Remove what no checkpoint that is kept has a use for. What cannot be told or removed now,
        because the store is away, is for the sweep of orphans.
        """
        kept = {one.manifest for one in last.backups}
        dropped = [one for one in before.backups if one.manifest not in kept]
        try:
            used, unused = manifest.names, set(stray)
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

    # Certainty

    async def is_synced(self, session_id: str) -> bool:
        """Whether nothing of a session's checkpoints waits on this node for the blob store."""
        return await self._blobs.is_synced(prefix_of(session_id))

    async def verify(self, session_id: str) -> Checkpoint:
        """
        The last checkpoint, read through: all of it is in the blob store, undamaged.
        `PermanentError`, `checkpoint_damaged`, says what is not; `TemporaryError`,
        `blobs_unavailable`, that some of it waits on this node still, or the store is away.
        """
        # So that no other one is taken meanwhile, which would remove objects of this one.
        async with self._alone(session_id), self._restoring:
            checkpoint = await self._last(session_id)
            if not await self.is_synced(session_id):
                raise BlobsUnavailable(
                    f"Files of session {session_id} wait on this node for the blob store.",
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
        What the workspace holds now, if only that it is empty, verified. When something that was
        stored before turns out to be damaged, all is stored again from the workspace, once.
        """
        await self.take(session_id, link, empty=True)
        try:
            return await self.verify(session_id)
        except PermanentError as error:
            log.warning("checkpoint.anew", session_id=session_id, error=error.message)
        await self.take(session_id, link, empty=True)
        return await self.verify(session_id)

    async def _mark_damaged(self, checkpoint: Checkpoint) -> None:
        """Have the next one store all of it again."""
        if not checkpoint.damaged:
            with contextlib.suppress(Conflict):  # There is another by now.
                await self._store.checkpoints.save(dataclasses.replace(checkpoint, damaged=True))

    async def named(self, checkpoint: Checkpoint) -> set[str]:
        """All objects that its backups need; `PermanentError` when one does not tell."""
        names: set[str] = set()
        for one in checkpoint.backups:
            names |= (await self._manifest(checkpoint.id, one)).names
        return names

    # Reading

    async def get(self, session_id: str) -> Checkpoint | None:
        found = await self._store.checkpoints.get(session_id)
        return None if found is None or found.number == NONE else found

    async def _last(self, session_id: str) -> Checkpoint:
        checkpoint = await self.get(session_id)
        if checkpoint is None:
            raise CheckpointNotFound(f"Session {session_id} has no checkpoint.")
        return checkpoint

    async def restore(
        self, source: str, link: Link, again: Callable[[], Awaitable[Link]]
    ) -> Restored:
        """
        Write the newest backup of session `source` that is whole into the new workspace behind the
        link. Each of which something is missing or damaged leaves a workspace that is of no use:
        `again` gives the link to another new one. `PermanentError` when none is whole.
        """
        async with self._restoring:
            try:
                async with asyncio.timeout(RESTORE_SECONDS):
                    return await self._newest_whole(source, link, again)
            except TimeoutError:
                raise TemporaryError(
                    f"The files of session {source} were not restored in {RESTORE_SECONDS:g} s.",
                    code="restore_timeout",
                ) from None

    async def _newest_whole(
        self, source: str, link: Link, again: Callable[[], Awaitable[Link]]
    ) -> Restored:
        failed: PermanentError | None = None
        for _ in range(RESTORES):
            last = await self._last(source)
            for backup in last.backups:
                older = backup.manifest != last.manifest
                if failed is not None:
                    link = await again()
                try:
                    await self._written(source, backup, link)
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
                    break  # Its objects may have gone for newer ones.
            else:
                await self._mark_damaged(last)
                break
        assert failed is not None
        raise failed

    async def _written(self, source: str, backup: CheckpointRef, link: Link) -> None:
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
        """What the last checkpoint says of a path."""
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
        """The bytes of a file in the last checkpoint."""
        objects = ChunkStore(self._blobs, session_id)
        for part in spans(entry.parts, start, entry.size if end is None else end):
            if part.object is None:
                for offset in range(0, part.length, ZEROS):
                    yield bytes(min(ZEROS, part.length - offset))
            else:
                yield await objects.part(part)

    async def entries(self, session_id: str, start: str = "") -> AsyncIterator[Entry]:
        """
        What the last checkpoint holds, in order of path, from the page on that has `start`; all of
        it if that is empty.
        """
        checkpoint = await self.get(session_id)
        if checkpoint is None:
            return
        objects = ChunkStore(self._blobs, session_id)
        for page in (await self._manifest(session_id, checkpoint.backups[0])).pages_from(start):
            for entry in await objects.page(page):
                yield entry

    # Its end

    async def keep_until(self, session_id: str, moment: datetime, *, mounted: bool) -> None:
        """
        The session has ended: what it has in the blob store goes at this time. One whose workspace
        was mounted from there has no checkpoint, only a record that says when.
        """
        found = await self._store.checkpoints.get(session_id)
        if found is not None and found.kept_until is None:
            await self._store.checkpoints.save(dataclasses.replace(found, kept_until=moment))
        elif found is None and mounted:
            now = self._clock.now()
            record = Checkpoint(session_id, NONE, "", now, 0, 0, self._node_id, moment)
            with contextlib.suppress(Conflict):  # Another sweep said so already.
                await self._store.checkpoints.add(record)

    async def forget(self, session_id: str) -> None:
        """
        Remove all that the session has in the blob store; the record last, so that one that is cut
        off is done again.
        """
        for kind in ("workspaces", "exports", "uploads"):
            await self._blobs.remove_all(f"{kind}/{session_id}/")
        session = await self._store.sessions.get(session_id)
        if session is not None:
            await self._volumes.discard_mounted(session)
        await self._store.checkpoints.remove(session_id)
