"""What changed, written in the same transaction as the change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.stores.sql.rows import encode, micros

if TYPE_CHECKING:
    from atoll.model.event import Event
    from atoll.stores.sql.engine import Connection

_TELL = """
    INSERT INTO events (created_at, type, subject, data)
    VALUES (:created_at, :type, :subject, :data)
"""


def tell(connection: Connection, event: Event | None) -> None:
    """Inside the transaction of what it tells of, so that one is there when the other is."""
    if event is not None:
        row = {
            "created_at": micros(event.at),
            "type": event.type,
            "subject": event.subject,
            "data": encode(event.data),
        }
        connection.execute(_TELL, row)
