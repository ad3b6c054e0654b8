"""
Removes orphaned blobs: those that nothing refers to, and that no write in progress will refer to.

A blob is an orphan if its session or execution does not exist, or has ended without referring to
it; if none of its session's checkpoints names it; or if it is a build archive that no template
names. It is removed once it is older than `GRACE` by the back-end's clock, because blobs are
written before the records that refer to them. Blobs of a session are kept while one of its
checkpoints is being taken, while its manifests cannot be read, and while this node's spool holds
changes to them. A record is read immediately before the blobs that it does not name are removed.

A turn checks a bounded number of blobs, and the next turn continues after them. One replica at a
time sweeps a blob store. A blob store that belongs to another database is not touched.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog

from atoll.blobs.base import PAGE_SIZE, OversizedBlob, UnlistableNames
from atoll.errors import BlobsUnavailable, PermanentError
from atoll.reconcile.sweep import exclusively, sweep
from atoll.service.checkpoints.chunks import data_of
from atoll.service.checkpoints.service import lease_of
from atoll.service.templates.build_inputs import CONTEXTS
from atoll.stores.batches import by_page

if TYPE_CHECKING:
    from atoll.blobs.base import BlobInfo, Blobs
    from atoll.service.checkpoints.service import Checkpoints
    from atoll.service.replica import Replica

log = structlog.get_logger(__name__)

SWEEP_INTERVAL = 60.0
"""Seconds between two turns."""
PAGES = 4
"""Pages of a list that a turn checks."""
VERSIONS = 100
"""Versions of a template that are read at a time."""
ROUND = 3600.0
"""Seconds between the end of one round over all blobs and the next."""
OWNER = "cluster/owner"
"""Key of the blob that names the owning database."""
MAX_OWNER = 1024
SESSIONS = ("workspaces/", "exports/", "uploads/")
EXECUTIONS = "executions/"
REQUESTS = "requests/"
KINDS = (*SESSIONS, EXECUTIONS, REQUESTS, CONTEXTS)

GRACE = timedelta(hours=24)
"""The age at which a blob that nothing refers to is removed."""


class OrphanedBlobSweep:
    def __init__(
        self,
        replica: Replica,
        blobs: Blobs,
        checkpoints: Checkpoints,
        *,
        cluster: str,
        name: str,
        request_ttl: timedelta,
    ) -> None:
        """`name` identifies the blob store: replicas that share one use the same name."""
        self._store = replica.store
        self._leases = replica.leases
        self._clock = replica.clock
        self._blobs = blobs
        self._checkpoints = checkpoints
        self._cluster = cluster
        self._key = f"orphans:{name}"
        self._request_ttl = request_ttl
        self._kind = 0
        self._after: str | None = None
        self._contexts: set[str] = set()
        """Build contexts that a template refers to."""
        self._rest_until = float("-inf")

    async def run(self) -> None:
        await sweep("orphan_sweep.failed", SWEEP_INTERVAL, self.turn)

    async def turn(self) -> None:
        if self._clock.monotonic() >= self._rest_until:
            await exclusively(self._leases, self._key, self.once)

    async def once(self) -> None:
        """Check the next pages."""
        if not await self._is_ours():
            return
        for _ in range(PAGES):
            kind = KINDS[self._kind]
            try:
                page = await self._blobs.list(kind, after=self._after)
            except UnlistableNames as error:
                # Objects of another program. They must not block the other kinds.
                log.warning("orphan_sweep.not_listed", kind=kind, error=error.message)
                page = []
            if kind == CONTEXTS and page:
                self._contexts = await self._contexts_named()
            for owner, group in itertools.groupby(page, lambda info: _owner(info.key)):
                try:
                    await self._check(kind, owner, [info for info in group if self._is_old(info)])
                except BlobsUnavailable as error:
                    # A failure for one owner must not affect the others.
                    log.info("orphan_sweep.skipped", owner=owner, error=error.message)
            if len(page) == PAGE_SIZE:
                self._after = page[-1].key
                continue
            self._after, self._kind = None, (self._kind + 1) % len(KINDS)
            if self._kind == 0:
                self._rest_until = self._clock.monotonic() + ROUND
                return

    async def _is_ours(self) -> bool:
        """Whether this database owns the blob store; the first one to ask becomes its owner."""
        if await self._store.cluster() != self._cluster:
            return False
        owner = await self._named_owner()
        if owner is None and await self._blobs.create(OWNER, self._cluster.encode()):
            return True
        if (owner or await self._named_owner()) == self._cluster.encode():
            return True
        log.warning("orphan_sweep.not_ours", owner=(owner or b"").decode(errors="replace")[:64])
        self._rest_until = self._clock.monotonic() + ROUND
        return False

    async def _named_owner(self) -> bytes | None:
        try:
            return await self._blobs.get(OWNER, limit=MAX_OWNER)
        except OversizedBlob:
            return b"?"  # Not the id of a database.

    def _is_old(self, info: BlobInfo, beyond: timedelta = timedelta(0)) -> bool:
        return self._clock.now() - info.modified_at >= GRACE + beyond

    async def _check(self, kind: str, owner: str, old: list[BlobInfo]) -> None:
        """Remove the orphans among one owner's blobs."""
        if not old:
            return
        if kind == EXECUTIONS:
            await self._remove(await self._of_execution(owner, old))
        elif kind == CONTEXTS:
            if owner not in self._contexts:
                # It may have been put again since it was listed.
                now = await self._blobs.head(old[0].key)
                if now is not None and self._is_old(now):
                    await self._remove([now])
        elif kind == REQUESTS:
            await self._remove([info for info in old if self._is_old(info, self._request_ttl)])
        else:
            await self._of_session(kind, owner, old)

    async def _contexts_named(self) -> set[str]:
        """Build contexts that a version of a template has; a node may have to build it again."""
        found: set[str] = set()
        async for newest in by_page(self._store.templates.page):
            versions, below = [newest], newest.number
            while versions:
                found |= {each.build_context for each in versions if each.build_context}
                versions = await self._store.templates.before(
                    newest.id, number=below, limit=VERSIONS
                )
                below = versions[-1].number if versions else 0
        return found

    async def _of_execution(self, execution_id: str, old: list[BlobInfo]) -> list[BlobInfo]:
        execution = await self._store.executions.get(execution_id)
        if execution is None:
            return old
        if not execution.status.ended:
            return []
        kept = set(execution.kept.values())
        return [info for info in old if info.key not in kept]

    async def _of_session(self, kind: str, session_id: str, old: list[BlobInfo]) -> None:
        lease = await self._leases.try_lease(lease_of(session_id))
        if lease is None:
            return  # A checkpoint of it is being taken.
        async with lease:
            if await self._blobs.is_synced(f"{kind}{session_id}/"):
                unneeded = await self._unneeded(kind, session_id, old)
                lease.check()
                await self._remove(unneeded)

    async def _unneeded(self, kind: str, session_id: str, old: list[BlobInfo]) -> list[BlobInfo]:
        session = await self._store.sessions.get(session_id)
        checkpoint = await self._store.checkpoints.get(session_id)
        if session is None and checkpoint is None:
            return old
        if kind != "workspaces/":
            # The blobs of an ended session are removed with its record; this one came later.
            ended = session is None or session.status.ended
            return old if ended and checkpoint is None else []
        if checkpoint is None or not checkpoint.manifest:
            return old
        try:
            names = await self._checkpoints.objects_of(checkpoint)
        except PermanentError as error:
            log.info("orphan_sweep.manifest_unreadable", session_id=session_id, error=error.message)
            return []
        needed = {data_of(session_id) + name for name in names}
        needed |= {one.manifest for one in checkpoint.backups}
        return [info for info in old if info.key not in needed]

    async def _remove(self, orphans: list[BlobInfo]) -> None:
        for info in orphans:
            # Not later: by then it may be needed again.
            await self._blobs.remove(info.key, deferrable=False)
        if orphans:
            size = sum(info.size for info in orphans)
            log.info("orphan.blobs", first=orphans[0].key, objects=len(orphans), size=size)


def _owner(key: str) -> str:
    """The id of the session, the execution or the request."""
    kind, first, *rest = key.split("/")
    return rest[0] if f"{kind}/" == EXECUTIONS and rest else first
