"""Shows at the node which session has which instance, where the driver supports that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.service.sessions.observers import SessionObserver

if TYPE_CHECKING:
    from atoll.drivers.base import Ownership
    from atoll.service.background import BackgroundTasks
    from atoll.service.sessions.connections import Connection


class InstanceOwnership(SessionObserver):
    def __init__(self, background: BackgroundTasks, ownership: Ownership) -> None:
        self._background = background
        self._ownership = ownership

    def session_connected(self, connection: Connection) -> None:
        # In the background: no request waits for it, and nothing depends on it.
        recording = self._ownership.record(connection.instance.handle, connection.session.id)
        self._background.start(recording, f"label {connection.instance.id}")
