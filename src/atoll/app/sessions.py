"""Sessions, from their records to the verbs of the API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.service.sessions.access import SessionAccess
from atoll.service.sessions.activity import Activity
from atoll.service.sessions.archive import Archiver
from atoll.service.sessions.autosave import Autosave, SavedSessions
from atoll.service.sessions.clone import Cloner
from atoll.service.sessions.connections import Connections
from atoll.service.sessions.create import Compute, SessionCreator
from atoll.service.sessions.dependencies import Dependencies
from atoll.service.sessions.instances import SessionInstances
from atoll.service.sessions.lifecycle import Lifecycle
from atoll.service.sessions.observers import SessionObservers
from atoll.service.sessions.provisioning import Provisioning
from atoll.service.sessions.records import SessionRecords
from atoll.service.sessions.secrets import Secrets, SessionSecrets
from atoll.service.sessions.service import Sessions, Verbs
from atoll.service.sessions.start import SessionStarter
from atoll.service.sessions.stop import InstanceStopper
from atoll.service.sessions.timers import SessionTimers
from atoll.service.sessions.transitions import Steps, Transitions
from atoll.service.sessions.update import SessionUpdater

if TYPE_CHECKING:
    from atoll.app.backends import Backends
    from atoll.app.compute import ComputeGroup
    from atoll.service.sessions.autosave import RemoteCheckpoints


@dataclass(frozen=True)
class ConnectionGroup:
    """Records of sessions, and connections to those that run."""

    observers: SessionObservers
    records: SessionRecords
    instances: SessionInstances
    connections: Connections


def connection_group(backends: Backends, compute: ComputeGroup) -> ConnectionGroup:
    replica, driver = backends.replica, backends.driver
    observers = SessionObservers()
    records = SessionRecords(replica, observers)
    instances = SessionInstances(
        replica, driver, compute.pool, compute.templates, compute.checkpoints
    )
    connections = Connections(replica, driver, records, instances, observers)
    return ConnectionGroup(observers, records, instances, connections)


@dataclass(frozen=True)
class SessionGroup:
    observers: SessionObservers
    access: SessionAccess
    autosave: Autosave
    transitions: Transitions
    timers: SessionTimers
    activity: Activity
    provisioning: Provisioning
    dependencies: Dependencies
    secrets: SessionSecrets
    service: Sessions

    def close(self) -> None:
        """Cancel all timers."""
        self.timers.close()
        self.autosave.close()
        self.activity.close()


def session_group(
    backends: Backends,
    compute: ComputeGroup,
    connected: ConnectionGroup,
    elsewhere: RemoteCheckpoints,
) -> SessionGroup:
    settings, replica, driver = backends.settings, backends.replica, backends.driver
    observers, records = connected.observers, connected.records
    instances, connections = connected.instances, connected.connections
    secrets = Secrets(backends.encryption)
    provisioning = Provisioning(secrets, compute.volumes, compute.packages, compute.templates)
    stopper = InstanceStopper(
        replica, driver, records, instances, compute.checkpoints, observers, settings
    )
    starter = SessionStarter(
        replica,
        records,
        instances,
        connections,
        stopper,
        provisioning,
        compute.admission,
        observers,
    )
    archiver = Archiver(
        replica, driver, records, instances, stopper, compute.checkpoints, settings.archive
    )
    autosave = Autosave(
        replica,
        driver,
        records,
        SavedSessions(connections, instances, starter, archiver, compute.checkpoints, elsewhere),
        observers,
        settings.workspace,
        remote=backends.spool,
        embedded=backends.embedded,
    )
    transitions = Transitions(
        replica,
        driver,
        records,
        Steps(starter, stopper, archiver, autosave, connections, instances),
        observers,
        settings,
    )
    lifecycle = Lifecycle(replica, records, transitions, observers)
    timers = SessionTimers(replica, records, lifecycle, transitions, observers)
    creator = SessionCreator(
        replica,
        Compute(driver, compute.pool, compute.templates, compute.admission, provisioning),
        records,
        connections,
        starter,
        autosave,
        observers,
        settings,
    )
    updater = SessionUpdater(
        replica,
        driver,
        compute.templates,
        records,
        instances,
        connections,
        creator,
        observers,
    )
    cloner = Cloner(replica, driver, records, instances, creator, updater, autosave, secrets)
    return SessionGroup(
        observers,
        SessionAccess(records, connections, starter),
        autosave,
        transitions,
        timers,
        Activity(replica, observers),
        provisioning,
        Dependencies(replica, records, connections, provisioning, compute.packages),
        SessionSecrets(replica, records, connections, secrets),
        Sessions(
            replica,
            driver,
            records,
            Verbs(creator, cloner, updater, lifecycle, starter, transitions),
            max_wait=settings.execution.max_wait,
        ),
    )
