"""The part of this package that other services get: records, connections and the starter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.service.sessions.connections import Connections
    from atoll.service.sessions.records import SessionRecords
    from atoll.service.sessions.start import SessionStarter


@dataclass(frozen=True)
class SessionAccess:
    records: SessionRecords
    connections: Connections
    starter: SessionStarter
