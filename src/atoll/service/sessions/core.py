"""The objects that the classes of this package have in common, as one constructor argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.drivers.base import Driver
    from atoll.service.checkpoints.service import Checkpoints
    from atoll.service.replica import Replica
    from atoll.service.sessions.assignment import InstanceAssignment
    from atoll.service.sessions.connections import Connections
    from atoll.service.sessions.instances import SessionInstances
    from atoll.service.sessions.observers import SessionObservers
    from atoll.service.sessions.records import SessionRecords


@dataclass(frozen=True)
class SessionCore:
    replica: Replica
    driver: Driver
    observers: SessionObservers
    records: SessionRecords
    instances: SessionInstances
    connections: Connections
    assignment: InstanceAssignment
    checkpoints: Checkpoints
