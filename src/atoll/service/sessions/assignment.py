"""
Assigns a new instance to a session: records it, or removes it if the record is refused.

No other module does this: it serves sessions that are created, started or recovered, with a ready
instance of the pool or a new one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from atoll.errors import Conflict, TemporaryError
from atoll.model.event import session_event
from atoll.model.session import Session, Warning
from atoll.model.session_changes import as_running, with_warnings

if TYPE_CHECKING:
    from atoll.service.instances import ReadyInstance
    from atoll.service.replica import Replica
    from atoll.service.sessions.connections import Connection, Connections
    from atoll.service.sessions.instances import SessionInstances
    from atoll.service.sessions.records import SessionRecords

STORE_RETRY_PAUSE = 1.0
"""Seconds between two reads of a store that is unavailable."""


class InstanceAssignment:
    def __init__(
        self,
        replica: Replica,
        records: SessionRecords,
        instances: SessionInstances,
        connections: Connections,
    ) -> None:
        self._replica = replica
        self._records = records
        self._instances = instances
        self._connections = connections

    async def assign(
        self, session: Session, ready: ReadyInstance, *, new: bool = False
    ) -> Connection:
        """
        Record the instance as the session's, and connect; with `new`, the session's record is made
        with it. On `Conflict` the instance is removed. If it is unknown whether the record was
        written, the instance is kept if it was, so that a repeated request finds it.
        """
        now = session.updated_at if new else self._replica.clock.now()
        running = as_running(
            with_warnings(session, *_of_lost_workspace(session, ready), *ready.warnings),
            now,
            instance_id=ready.instance.id,
            workspace=ready.instance.workspace,
        )
        made_workspace = ready.instance.workspace != session.workspace
        try:
            if new:
                event = session_event(running, now, "created")
                await self._replica.store.sessions.add(running, event=event)
            else:
                running = await self._records.save(running)
        except Conflict:
            await asyncio.shield(self._instances.discard(ready, with_workspace=made_workspace))
            raise
        except BaseException:
            self._replica.background.start(
                self._keep_if_recorded(running, ready), f"resolve the start of {session.id}"
            )
            raise
        return self._connections.keep(running, ready.instance, ready.link)

    async def _keep_if_recorded(self, session: Session, ready: ReadyInstance) -> None:
        while True:
            try:
                found = await self._replica.store.sessions.get(session.id)
                break
            except TemporaryError:
                await asyncio.sleep(STORE_RETRY_PAUSE)
        if found is None or found.status.ended or found.instance_id != ready.instance.id:
            unowned = found is None or found.workspace != ready.instance.workspace
            await self._instances.discard(ready, with_workspace=unowned)
        elif self._connections.reachable(session.id) is not None:
            ready.link.close()  # A repeated request has connected already.
        else:
            self._connections.keep(found, ready.instance, ready.link)


def _of_lost_workspace(session: Session, ready: ReadyInstance) -> tuple[Warning, ...]:
    if session.workspace in (None, ready.instance.workspace):
        return ()
    message = (
        "The workspace was lost with the disk of its node; the files are those of the last "
        "checkpoint."
    )
    return (Warning("workspace_restored", message),)
