"""Opens links to the executors of containers, and prepares them for user code."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from atoll.drivers.docker import socket_link
from atoll.drivers.docker.labels import LinkKind
from atoll.drivers.shared import cgroups
from atoll.drivers.shared.executor_links import release_zygote
from atoll.drivers.shared.instance_paths import EXECUTOR

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from atoll.drivers.docker.exec_link import ExecLinks
    from atoll.drivers.docker.hijacked_connection import HijackedConnection
    from atoll.drivers.docker.node_identity import NodeIdentity
    from atoll.drivers.docker.storage import Storage
    from atoll.link.client import Link
    from atoll.model.instance import Handle
    from atoll.settings import LinkSettings


class InstanceLinks:
    def __init__(
        self,
        identity: NodeIdentity,
        storage: Storage,
        exec_links: ExecLinks,
        settings: LinkSettings,
    ) -> None:
        self._identity = identity
        self._storage = storage
        self._exec_links = exec_links
        self._settings = settings
        self._new: set[str] = set()
        """Instances that had no link yet: the first one may take longer."""
        self._relays: dict[str, asyncio.Task[HijackedConnection]] = {}
        """Relays for the first links of instances."""

    def close(self) -> None:
        for instance_id in list(self._relays):
            self.forget(instance_id)

    def start_relay(self, instance_id: str, container: str, python: Sequence[str]) -> None:
        """
        Start the relay for the instance's first link, while its executor starts: each of them takes
        an interpreter's start, which is slow under gVisor.
        """
        self._relays[instance_id] = asyncio.create_task(
            self._exec_links.start_relay(container, python, EXECUTOR),
            name=f"start relay {instance_id}",
        )

    def add_new(self, instance_id: str) -> None:
        self._new.add(instance_id)

    def new_instances(self) -> set[str]:
        return set(self._new)

    def forget(self, instance_id: str) -> None:
        self._new.discard(instance_id)
        relay = self._relays.pop(instance_id, None)
        if relay is not None:
            relay.cancel()
            relay.add_done_callback(_abort)

    async def open(self, handle: Handle, inspected: dict[str, Any]) -> Link:
        """A link to the executor of a running container, which can run user code from now on."""
        link = await self._connect(handle, inspected["Config"]["Entrypoint"])
        try:
            # Before user code runs, and for every link: the one before may have been interrupted.
            await self._storage.seal(handle.instance_id, str(handle.data["workspace"]))
            await release_zygote(link, cgroups.ControlGroups(), handle.instance_id)
        except BaseException:
            link.close()
            raise
        self.forget(handle.instance_id)
        return link

    async def _connect(self, handle: Handle, entrypoint: list[str]) -> Link:
        settings = self._settings
        is_new = handle.instance_id in self._new
        timeout = settings.start_timeout if is_new else settings.connect_timeout
        token = self._identity.token(handle.instance_id)
        directory = self._storage.socket(handle.instance_id)
        if handle.data["link"] == LinkKind.SOCKET and directory is not None:
            return await socket_link.connect(directory, settings, timeout=timeout, token=token)
        container = str(handle.data["container"])
        relay: Awaitable[HijackedConnection] | None = self._relays.pop(handle.instance_id, None)
        if relay is None:
            python = entrypoint[: entrypoint.index("-I")]
            relay = self._exec_links.start_relay(container, python, EXECUTOR)
        return await self._exec_links.connect(
            container, relay, settings, timeout=timeout, token=token
        )


def _abort(relay: asyncio.Task[HijackedConnection]) -> None:
    if not relay.cancelled() and relay.exception() is None:
        relay.result().abort()
