"""
Removes instances and workspaces that no session owns.

They are kept for a while first, because they may be about to get an owner. One replica at a time
sweeps a node.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import structlog

from atoll.reconcile.sweep import exclusively, sweep
from atoll.service.instances import remove_instance
from atoll.service.sessions.records import instance_lease, workspace_lease

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from atoll.drivers.base import Driver
    from atoll.model.instance import Handle, Instance
    from atoll.service.pool.service import Pool
    from atoll.service.replica import Replica
    from atoll.service.sessions.transitions import Transitions
    from atoll.settings import SessionSettings

log = structlog.get_logger(__name__)

BATCH = 1000
ORPHAN_AGE = 120.0
"""
Seconds that an instance or workspace without an owner is kept: it may be about to get one.
"""


class OrphanedInstanceSweep:
    def __init__(
        self,
        replica: Replica,
        driver: Driver,
        transitions: Transitions,
        pool: Pool,
        settings: SessionSettings,
        cluster: str,
    ) -> None:
        self._store = replica.store
        self._coordination = replica.coordination
        self._leases = replica.leases
        self._clock = replica.clock
        self._node_id = replica.node_id
        self._driver = driver
        self._transitions = transitions
        self._pool = pool
        self._settings = settings
        self._key = f"sweep:{replica.node_id}"
        self._cluster = cluster
        self._first_seen: dict[str, float] = {}

    async def run(self) -> None:
        turn = partial(exclusively, self._leases, self._key, self.once)
        await sweep("sweep.failed", self._settings.sweep.total_seconds(), turn)

    async def once(self) -> None:
        await self._end_broken()
        if await self._store.cluster() == self._cluster:
            await self._remove_orphans()
        else:
            # An address leads to another database, which does not have the sessions of this node.
            log.error("database.wrong", node=self._key, belongs_to=self._cluster)

    async def _end_broken(self) -> None:
        """
        End instances that lost the mount of a volume or workspace, such as when s3fs was killed.
        The next request for the session creates a new instance with new mounts.
        """
        volumes = self._driver.volumes
        broken = set() if volumes is None else set(await volumes.broken())
        if broken:
            for handle in await self._driver.handles():
                if handle.instance_id in broken:
                    log.warning("instance.mount_lost", instance_id=handle.instance_id)
                    ending = self._driver.stop(handle, grace=timedelta(0))
                    await self._try(ending, instance_id=handle.instance_id)

    async def _try(self, work: Awaitable[object], **about: str) -> None:
        """Log a failure instead of raising it, so that it does not delay the others."""
        try:
            await work
        except Exception as error:
            log.warning("sweep.item_failed", exc_info=error, **about)

    async def _remove_orphans(self) -> None:
        owned, kept, ended = await self._owned()
        seen: dict[str, float] = {}
        now = self._clock.monotonic()
        handles = await self._driver.handles()
        orphans = [
            handle
            for handle in handles
            if handle.instance_id not in owned
            and (self._is_old(handle.instance_id, seen, now) or handle.instance_id in ended)
        ]
        for handle in orphans:
            log.info("orphan.instance", instance_id=handle.instance_id)
            await self._try(self._remove(handle), instance_id=handle.instance_id)
        if orphans:
            # Which of them are gone.
            handles = await self._driver.handles()
        there = {handle.instance_id for handle in handles}
        for instance in await self._store.instances.all():
            # Removed from the node, but its record could not be deleted then.
            if instance.node_id != self._node_id or instance.id in there | owned:
                continue
            if self._is_old(f"record {instance.id}", seen, now):
                log.info("orphan.record", instance_id=instance.id)
                await self._try(self._forget(instance), instance_id=instance.id)
        # Workspaces of existing instances are removed after them.
        kept |= {self._driver.workspaces.of(handle) for handle in handles}
        for workspace in await self._driver.workspaces.names():
            if workspace in kept or await self._is_held(workspace_lease(workspace)):
                continue
            if self._is_old(f"workspace {workspace}", seen, now):
                log.info("orphan.workspace", workspace=workspace)
                await self._try(self._driver.workspaces.discard(workspace), workspace=workspace)
        self._first_seen = seen

    async def _remove(self, handle: Handle) -> None:
        instance = await self._store.instances.get(handle.instance_id)
        # First: its replica may come back and assign it to a session just now.
        if instance is not None and instance.session_id is None:
            taken = not await self._store.instances.remove_unclaimed(instance.id)
            if taken:
                return
        elif instance is not None and await self._is_owned(instance):
            return
        await remove_instance(self._store, self._driver, handle)

    async def _forget(self, instance: Instance) -> None:
        if not await self._is_owned(instance):
            await self._store.instances.remove(instance.id)

    async def _is_owned(self, instance: Instance) -> bool:
        """Whether a session has got it since the owners were read."""
        session = await self._store.sessions.get(instance.session_id or "")
        return (
            session is not None and not session.status.ended and session.instance_id == instance.id
        )

    def _is_old(self, key: str, seen: dict[str, float], now: float) -> bool:
        seen[key] = self._first_seen.get(key, now)
        return now - seen[key] >= ORPHAN_AGE

    async def _owned(self) -> tuple[set[str], set[str], set[str]]:
        """
        Instances and workspaces that belong to a session or the pool, and the instances of ended
        sessions.
        """
        instances: set[str] = set()
        workspaces: set[str] = set()
        ended: set[str] = set()
        after = ""
        while True:
            batch = await self._store.sessions.holdings(self._node_id, limit=BATCH, after=after)
            for holding in batch:
                instances.add(holding.instance_id or "")
                workspaces.add(holding.workspace or "")
            if len(batch) < BATCH:
                break
            after = batch[-1].session_id
        for instance in await self._store.instances.all():
            if await self._is_ready(instance):
                instances.add(instance.id)
                workspaces.add(instance.workspace)
            elif instance.id not in instances and self._is_of_session(instance):
                if await self._is_being_changed(instance.session_id or ""):
                    instances.add(instance.id)
                    workspaces.add(instance.workspace)
                elif await self._has_ended(instance):
                    ended.add(instance.id)
        return instances, workspaces, ended

    def _is_of_session(self, instance: Instance) -> bool:
        return instance.session_id is not None and instance.node_id == self._node_id

    async def _has_ended(self, instance: Instance) -> bool:
        session = await self._store.sessions.get(instance.session_id or "")
        return session is not None and session.status.ended

    async def _is_being_changed(self, session_id: str) -> bool:
        """
        Whether a replica is changing what the session has on this node: creating an instance, or
        saving the files of an ended session.
        """
        return self._transitions.is_clearing(session_id) or await self._is_held(
            instance_lease(session_id)
        )

    async def _is_held(self, key: str) -> bool:
        lease = await self._leases.try_lease(key, self._leases.new_owner())
        if lease is None:
            return True
        async with lease:
            return False

    async def _is_ready(self, instance: Instance) -> bool:
        """Whether it is in the pool of a live replica."""
        if instance.session_id is not None or instance.holder is None:
            return False
        if instance.holder == self._coordination.replica:
            return self._pool.holds(instance.id)
        return await self._coordination.alive(instance.holder)
