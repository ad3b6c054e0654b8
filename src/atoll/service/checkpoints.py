"""
Checkpoints: a session's workspace in the blob store.

One at a time is taken of a session, by whichever replica; each replaces the one before, whose
objects go when the next one is there, so whoever reads the old one meanwhile still can. A file that
changes while it is read, or code that runs meanwhile, makes a checkpoint that is not settled: a
later one takes its place as soon as there is quiet. After its session has ended the last one is
kept for a while, for whoever comes for the files.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import TYPE_CHECKING

import structlog

from atoll.errors import Conflict, NotFound, PermanentError, TemporaryError
from atoll.model.checkpoint import Checkpoint
from atoll.model.manifest import LARGEST, Entry, Manifest, read_manifest, spans
from atoll.service.capture import Capture
from atoll.service.objects import SessionObjects, prefix_of
from atoll.service.restore import Restore
from atoll.service.verification import Verification

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from datetime import datetime

    from atoll.blobs.base import Blobs
    from atoll.clock import Clock
    from atoll.link.client import Link
    from atoll.model.session import Session
    from atoll.service.leases import Leases
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)

AT_ONCE = 2
"""
Checkpoints that this process takes at the same time, and that it restores: whoever makes one that
takes long keeps nobody's files from coming back. Each needs up to 64 MiB.
"""
AWAY = "blobs_unavailable"
NONE = 0
"""The number of a record that names no checkpoint."""
ZEROS = 1 << 20
"""Bytes of a hole that are sent at once."""


async def _nothing(session: Session) -> None:
    """No workspace is mounted here."""


class Checkpoints:
    def __init__(
        self, store: Store, blobs: Blobs, leases: Leases, clock: Clock, node_id: str
    ) -> None:
        self._store = store
        self._blobs = blobs
        self._leases = leases
        self._clock = clock
        self._node_id = node_id
        self._taking = asyncio.Semaphore(AT_ONCE)
        self._restoring = asyncio.Semaphore(AT_ONCE)
        self.discard_mounted: Callable[[Session], Awaitable[None]] = _nothing
        """Removes what an ended session has in a workspace that was mounted."""

    # Taking

    async def take(
        self, session_id: str, link: Link, *, quiet: Callable[[], bool] = lambda: True
    ) -> Checkpoint | None:
        """
        What the workspace holds now; None when that is nothing and there was nothing before.
        `quiet` is asked at the end whether nothing ran meanwhile.
        """
        # Of this take alone: the same owner would be let in twice.
        owner = self._leases.own()
        # The slot last: those in line for one session keep none from others, and by the lease a
        # sweep sees that the instance is still needed.
        async with self._leases.lease(f"checkpoint:{session_id}", owner), self._taking:
            before = await self._store.checkpoints.get(session_id)
            began = self._clock.monotonic()
            capture = await self._captured(session_id, link, before)
            if before is None and not capture.entries:
                return None
            if before is not None and not capture.changed:
                return before
            return await self._record(session_id, before, capture, quiet(), began)

    async def _captured(self, session_id: str, link: Link, before: Checkpoint | None) -> Capture:
        try:
            manifest = await self._readable(before)
            capture = Capture(link, SessionObjects(self._blobs, session_id), manifest)
            await capture.run()
        except TemporaryError as error:
            if before is None or error.code != AWAY:
                raise
            # What the store has of it cannot be asked, but what is put waits on the node's disk:
            # all of it, once. The next one can build on that.
            log.info("checkpoint.anew", session_id=session_id, error=error.message)
            capture = Capture(link, SessionObjects(self._blobs, session_id), None)
            await capture.run()
        return capture

    async def _readable(self, checkpoint: Checkpoint | None) -> Manifest | None:
        """To build on; one that is lost is no reason not to take another."""
        if checkpoint is None:
            return None
        try:
            return await self._manifest(checkpoint)
        except PermanentError as error:
            log.error("checkpoint.lost", session_id=checkpoint.id, error=error.message)
            return None

    async def _record(
        self,
        session_id: str,
        before: Checkpoint | None,
        capture: Capture,
        quiet: bool,
        began: float,
    ) -> Checkpoint:
        await self._check_here(session_id)
        number = 1 if before is None else before.number + 1
        now = self._clock.now()
        manifest = capture.manifest(session_id, number, now.isoformat(), quiet)
        key = f"{prefix_of(session_id)}manifests/{number:08d}"
        await self._blobs.put(key, manifest.encoded())
        checkpoint = Checkpoint(
            id=session_id,
            number=number,
            manifest=key,
            created_at=now,
            files=capture.files,
            # Holes count, so user code can make it larger than a database's numbers are.
            size=min(capture.size, LARGEST),
            node_id=self._node_id,
        )
        if before is None:
            await self._store.checkpoints.add(checkpoint)
        else:
            kept = before.kept_until
            checkpoint = await self._store.checkpoints.save(
                dataclasses.replace(checkpoint, kept_until=kept, version=before.version)
            )
            await self._clean(session_id, before, manifest)
        log.info(
            "checkpoint.taken",
            session_id=session_id,
            number=number,
            files=capture.files,
            size=capture.size,
            stored=capture.stored,
            took_ms=round((self._clock.monotonic() - began) * 1000),
        )
        return checkpoint

    async def _check_here(self, session_id: str) -> None:
        """
        Files that a session left behind on this node are not its files any more: it may have gone
        on elsewhere with those that were saved before.
        """
        session = await self._store.sessions.get(session_id)
        if session is not None and session.runtime_node != self._node_id:
            raise TemporaryError(
                f"Session {session_id} is on node {session.runtime_node} now.",
                code="node_not_reached",
            )

    async def _clean(self, session_id: str, before: Checkpoint, last: Manifest) -> None:
        """
        Remove what the checkpoint before the last one had no use for, and its manifest; not what
        the last one uses again, for a content that came back. What stays because the store is away
        goes with all the rest, in `forget`.
        """
        try:
            data = await self._blobs.get(before.manifest)
            if data is not None:
                used = last.objects.keys() | {name for _, name in last.pages}
                unused = set(read_manifest(data).dropped) - used
                await SessionObjects(self._blobs, session_id).remove(unused)
            if before.number > 1:
                older = f"{prefix_of(session_id)}manifests/{before.number - 1:08d}"
                await self._blobs.remove(older)
        except TemporaryError as error:
            log.info("checkpoint.not_cleaned", session_id=session_id, error=error.message)

    # Certainty

    async def is_home(self, session_id: str) -> bool:
        """Whether nothing of a session's checkpoints waits on this node for the blob store."""
        return await self._blobs.is_home(prefix_of(session_id))

    async def verify(self, session_id: str) -> Checkpoint:
        """
        The last checkpoint, read through: all of it is in the blob store, undamaged.
        `PermanentError`, `checkpoint_damaged`, says what is not; `TemporaryError`,
        `blobs_unavailable`, that some of it waits on this node still, or the store is away.
        """
        owner = self._leases.own()
        # So that no other one is taken meanwhile, which would remove objects of this one.
        async with self._leases.lease(f"checkpoint:{session_id}", owner), self._restoring:
            checkpoint = await self.get(session_id)
            if checkpoint is None:
                raise NotFound(
                    f"Session {session_id} has no checkpoint.", code="checkpoint_not_found"
                )
            if not await self.is_home(session_id):
                raise TemporaryError(
                    f"Files of session {session_id} wait on this node for the blob store.",
                    code=AWAY,
                )
            manifest = await self._manifest(checkpoint)
            await Verification(self._blobs, session_id, manifest).run()
            return checkpoint

    # Reading

    async def get(self, session_id: str) -> Checkpoint | None:
        found = await self._store.checkpoints.get(session_id)
        return None if found is None or found.number == NONE else found

    async def restore(self, source: str, link: Link) -> Checkpoint:
        """Write the last checkpoint of session `source` into the new workspace behind the link."""
        checkpoint = await self.get(source)
        if checkpoint is None:
            raise NotFound(f"Session {source} has no checkpoint.", code="checkpoint_not_found")
        manifest = await self._manifest(checkpoint)
        began = self._clock.monotonic()
        async with self._restoring:
            objects = SessionObjects(self._blobs, source)
            await Restore(link, objects, manifest).run()
        log.info(
            "checkpoint.restored",
            session_id=source,
            number=checkpoint.number,
            files=checkpoint.files,
            size=checkpoint.size,
            took_ms=round((self._clock.monotonic() - began) * 1000),
        )
        return checkpoint

    async def _manifest(self, checkpoint: Checkpoint) -> Manifest:
        data = await self._blobs.get(checkpoint.manifest)
        if data is None:
            raise PermanentError(
                f"The checkpoint of session {checkpoint.id} is gone from the blob store.",
                code="checkpoint_damaged",
            )
        return read_manifest(data)

    async def find(self, session_id: str, path: str) -> Entry | None:
        """What the last checkpoint says of a path."""
        checkpoint = await self.get(session_id)
        if checkpoint is None:
            return None
        manifest = await self._manifest(checkpoint)
        page = manifest.page_of(path)
        if page is None:
            return None
        entries = await SessionObjects(self._blobs, session_id).page(page)
        return next((entry for entry in entries if entry.path == path), None)

    async def content(
        self, session_id: str, entry: Entry, start: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        """The bytes of a file in the last checkpoint."""
        objects = SessionObjects(self._blobs, session_id)
        for part in spans(entry.parts, start, entry.size if end is None else end):
            if part.object is None:
                for offset in range(0, part.length, ZEROS):
                    yield bytes(min(ZEROS, part.length - offset))
            else:
                data = await objects.get(part.object)
                yield data[part.offset : part.offset + part.length]

    async def entries(self, session_id: str, start: str = "") -> AsyncIterator[Entry]:
        """
        What the last checkpoint holds, in order of path, from the page on that has `start`; all of
        it if that is empty.
        """
        checkpoint = await self.get(session_id)
        if checkpoint is None:
            return
        objects = SessionObjects(self._blobs, session_id)
        for page in (await self._manifest(checkpoint)).pages_from(start):
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
            await self.discard_mounted(session)
        await self._store.checkpoints.remove(session_id)
