"""
Makes and removes instances, whether for a warm pool or for a session.

An instance is recorded in the store before anyone uses it, and its record is removed last: what a
crash leaves on a node is found by its record, or by `reconcile/orphaned_instances.py`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from atoll import ids
from atoll.model.instance import Instance, InstanceSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.drivers.base import Driver
    from atoll.link.client import Link
    from atoll.model.instance import Callback, Handle
    from atoll.model.resources import Resources
    from atoll.model.session import Warning
    from atoll.model.template import Template
    from atoll.model.volume import Volume, VolumeMount
    from atoll.service.replica import Replica
    from atoll.stores.base import Store


@dataclass(frozen=True, slots=True)
class ReadyInstance:
    """An unused instance, and its link."""

    instance: Instance
    link: Link
    resources: Resources
    made_at: float
    """Monotonic clock, in seconds."""
    warnings: tuple[Warning, ...] = ()
    """For the session that takes it."""


class TemplateProvider(Protocol):
    async def provide(self, template: Template) -> None:
        """
        Return if this node has all that the template's instances need. Otherwise begin to build it,
        and raise `TemporaryError`.
        """


class StartStatistics(Protocol):
    def record_start(self, template_id: str, seconds: float | None, memory: int | None) -> None:
        """
        An instance with a new workspace has started; `seconds` is null for that of a session,
        `memory` where the node cannot measure it.
        """


class InstanceMaker:
    def __init__(
        self,
        replica: Replica,
        driver: Driver,
        builds: TemplateProvider,
        statistics: StartStatistics,
        *,
        ephemeral: bool = False,
        callback: Callable[[str], Callback] | None = None,
    ) -> None:
        """`callback` gives the address to which the executor of an instance reports, if any."""
        self._store = replica.store
        self._clock = replica.clock
        self._node_id = replica.node_id
        self._replica_id = replica.id
        self._driver = driver
        self._builds = builds
        self._statistics = statistics
        self._ephemeral = ephemeral
        self._callback = callback

    async def make(
        self,
        template: Template,
        resources: Resources,
        *,
        session_id: str | None = None,
        workspace: str | None = None,
        volumes: tuple[tuple[Volume, VolumeMount], ...] = (),
        prefix: str | None = None,
        on_delay: Callable[[str], None] | None = None,
    ) -> ReadyInstance:
        """
        Start an instance, record it and connect to it. A failure leaves nothing behind.

        An instance for a session is recorded as the session's own from the beginning: a replica
        that finds it after a crash must not mistake it for an instance of the pool.
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
            session_id,
            on_delay,
        )
        await self._builds.provide(template)
        begun = self._clock.monotonic()
        handle = await self._driver.ensure(spec)
        try:
            instance = Instance(
                id=spec.instance_id,
                node_id=self._node_id,
                template_id=template.id,
                template_version=template.number,
                workspace=self._driver.workspaces.of(handle),
                handle=handle,
                created_at=self._clock.now(),
                session_id=session_id,
                holder=self._replica_id if session_id is None else None,
            )
            await self._store.instances.add(instance)
            link = await self._driver.connect(handle)
            made_at = self._clock.monotonic()
            if workspace is None:
                # Before anything runs in it: so one measurement predicts the next instance.
                memory = await self._driver.limits.memory_used(handle)
                seconds = made_at - begun if session_id is None else None
                self._statistics.record_start(template.id, seconds, memory)
        except BaseException:
            await asyncio.shield(
                remove_instance(self._store, self._driver, handle, with_workspace=workspace is None)
            )
            raise
        return ReadyInstance(instance, link, resources, made_at)


async def remove_instance(
    store: Store, driver: Driver, handle: Handle, *, with_workspace: bool = False
) -> None:
    """Remove an instance from its node and from the store; it may be gone from either already."""
    await driver.destroy(handle)
    if with_workspace:
        await driver.workspaces.discard(driver.workspaces.of(handle))
    await store.instances.remove(handle.instance_id)
