"""
Ready instances, waiting for a session.

Taking one is a pop from a list: whatever takes time was done when it was made. An empty pool is a
cold start, never an error. The refill runs in `reconcile/pool.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from atoll import ids
from atoll.model.instance import Instance, InstanceSpec

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import datetime

    from atoll.clock import Clock
    from atoll.drivers.base import Driver
    from atoll.link.client import Link
    from atoll.model.instance import Callback
    from atoll.model.resources import Resources
    from atoll.model.session import Warning
    from atoll.model.template import Template
    from atoll.model.volume import Volume, VolumeMount
    from atoll.stores.base import Store

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """An instance with its link, as it has come up."""

    instance: Instance
    link: Link
    resources: Resources
    warnings: tuple[Warning, ...] = ()
    """What its session is to be told of it."""


class Pool:
    def __init__(
        self,
        store: Store,
        driver: Driver,
        clock: Clock,
        node_id: str,
        replica: str,
        *,
        ephemeral: bool,
        callback: Callable[[str], Callback] | None = None,
    ) -> None:
        self._store = store
        self._driver = driver
        self._clock = clock
        self._node_id = node_id
        self._replica = replica
        self._ephemeral = ephemeral
        self._callback = callback
        """Where the executor of an instance is to report, if anywhere."""
        self._ready: dict[tuple[str, datetime, int], list[Ready]] = {}
        self.provide: Callable[[Template], Awaitable[None]] = _as_it_is
        """Sees to it that the node has what the template's instances need, or raises."""
        self.changed = asyncio.Event()
        """Set when there may be something to refill."""

    def take(self, template: Template, resources: Resources) -> Ready | None:
        """
        One that fits; those whose link has gone meanwhile are passed over and cleared away later.
        """
        self.changed.set()
        waiting = self._ready.get(template.edition)
        while waiting:
            ready = waiting.pop()
            if ready.link.alive and ready.resources.disk == resources.disk:
                return ready
            if ready.link.alive:
                waiting.append(ready)
                return None
        return None

    def put(self, template: Template, ready: Ready) -> None:
        # One that dies while it waits is missed at once, not when somebody comes for it.
        ready.link.closed.add_done_callback(lambda _: self.changed.set())
        self._ready.setdefault(template.edition, []).append(ready)

    def size(self, template: Template) -> int:
        waiting = self._ready.get(template.edition, [])
        waiting[:] = [ready for ready in waiting if ready.link.alive]
        return len(waiting)

    def sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for (template_id, _, _), waiting in self._ready.items():
            alive = sum(ready.link.alive for ready in waiting)
            sizes[template_id] = sizes.get(template_id, 0) + alive
        return sizes

    def holds(self, instance_id: str) -> bool:
        return any(
            ready.instance.id == instance_id and ready.link.alive
            for waiting in self._ready.values()
            for ready in waiting
        )

    def drop(self, wanted: set[tuple[str, datetime, int]]) -> list[Ready]:
        """Take out all that belong to editions of templates that are not in `wanted`."""
        dropped: list[Ready] = []
        for key in [key for key in self._ready if key not in wanted]:
            dropped += self._ready.pop(key)
        return dropped

    async def make(
        self,
        template: Template,
        resources: Resources,
        *,
        session_id: str | None = None,
        workspace: str | None = None,
        volumes: tuple[tuple[Volume, VolumeMount], ...] = (),
        prefix: str | None = None,
    ) -> Ready:
        """
        A new instance, recorded and connected; none is left behind when that fails.

        One that is made for a session is recorded as its own from the first, so that nobody who
        finds it after a crash takes it for one of the pool.
        """
        instance_id = ids.instance_id()
        spec = InstanceSpec(
            instance_id,
            template,
            resources,
            workspace,
            self._ephemeral,
            None if self._callback is None else self._callback(instance_id),
            volumes,
            prefix,
        )
        await self.provide(template)
        handle = await self._driver.ensure(spec)
        try:
            instance = Instance(
                id=spec.instance_id,
                node_id=self._node_id,
                template_id=template.id,
                template_version=template.number,
                workspace=self._driver.workspace_of(handle),
                handle=handle,
                created_at=self._clock.now(),
                session_id=session_id,
                holder=self._replica if session_id is None else None,
            )
            await self._store.instances.add(instance)
            link = await self._driver.connect(handle)
        except BaseException:
            await asyncio.shield(self.clear(spec.instance_id, workspace is None))
            raise
        return Ready(instance, link, resources)

    async def adopt(self, template: Template, instance: Instance) -> bool:
        """
        Take over an instance that waited in the pool of a replica that is lost; False when somebody
        else did.
        """
        if not await self._store.instances.claim(
            instance.id, holder=self._replica, instead_of=instance.holder
        ):
            return False
        link = await self._driver.connect(instance.handle)
        self.put(template, Ready(instance, link, template.default_resources))
        return True

    async def clear(self, instance_id: str, workspace_too: bool) -> None:
        """Remove an instance from the node and the store."""
        for handle in await self._driver.handles():
            if handle.instance_id == instance_id:
                await self._driver.destroy(handle)
                if workspace_too:
                    await self._driver.discard(self._driver.workspace_of(handle))
        await self._store.instances.remove(instance_id)

    async def destroy(self, ready: Ready) -> None:
        """End an instance that no session owns, and its workspace."""
        ready.link.close()
        await self._driver.destroy(ready.instance.handle)
        await self._driver.discard(ready.instance.workspace)
        await self._store.instances.remove(ready.instance.id)

    async def close(self) -> None:
        for ready in self.drop(set()):
            await self.destroy(ready)


async def _as_it_is(template: Template) -> None:
    """The node has it, or the driver says that it does not."""
