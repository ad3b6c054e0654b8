"""Sessions, from their records to the verbs of the API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.service.sessions.access import SessionAccess
from atoll.service.sessions.activity import Activity
from atoll.service.sessions.archive import Archiver
from atoll.service.sessions.assignment import InstanceAssignment
from atoll.service.sessions.autosave import Autosave
from atoll.service.sessions.checkpoint_requests import CheckpointRequests
from atoll.service.sessions.clone import Cloner
from atoll.service.sessions.connections import Connections
from atoll.service.sessions.core import SessionCore
from atoll.service.sessions.create import SessionCreator
from atoll.service.sessions.dependencies import Dependencies
from atoll.service.sessions.disruptions import SessionDisruptions
from atoll.service.sessions.instances import SessionInstances
from atoll.service.sessions.new_session import SessionBuilder
from atoll.service.sessions.observers import SessionObservers
from atoll.service.sessions.ownership import InstanceOwnership
from atoll.service.sessions.provisioning import Provisioning
from atoll.service.sessions.records import SessionRecords
from atoll.service.sessions.secrets import Secrets, SessionSecrets
from atoll.service.sessions.service import Sessions
from atoll.service.sessions.start import SessionStarter
from atoll.service.sessions.stop import InstanceStopper
from atoll.service.sessions.timers import SessionTimers
from atoll.service.sessions.transitions import Transitions
from atoll.service.sessions.update import SessionUpdater
from atoll.service.sessions.wanted_state import WantedStates

if TYPE_CHECKING:
    from atoll.app.backends import Backends
    from atoll.app.compute import ComputeGroup
    from atoll.service.sessions.checkpoint_requests import RemoteCheckpoints


def session_core(backends: Backends, compute: ComputeGroup) -> SessionCore:
    replica, driver = backends.replica, backends.driver
    observers = SessionObservers()
    records = SessionRecords(replica, observers)
    instances = SessionInstances(
        replica, driver, compute.instance_maker, compute.templates, compute.checkpoints
    )
    connections = Connections(replica, driver, records, instances, observers)
    return SessionCore(
        replica,
        driver,
        observers,
        records,
        instances,
        connections,
        InstanceAssignment(replica, records, instances, connections),
        compute.checkpoints,
    )


@dataclass(frozen=True)
class SessionGroup:
    observers: SessionObservers
    access: SessionAccess
    disruptions: SessionDisruptions
    autosave: Autosave
    checkpoint_requests: CheckpointRequests
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
    backends: Backends, compute: ComputeGroup, core: SessionCore, elsewhere: RemoteCheckpoints
) -> SessionGroup:
    settings = backends.settings
    secrets = Secrets(backends.encryption)
    provisioning = Provisioning(secrets, compute.volumes, compute.packages, compute.templates)
    stopper = InstanceStopper(core, settings)
    starter = SessionStarter(core, stopper, provisioning, compute.admission)
    archiver = Archiver(core, stopper, settings.archive)
    autosave = Autosave(
        core,
        archiver,
        settings.workspace,
        remote=backends.spool,
        embedded=backends.embedded,
    )
    checkpoint_requests = CheckpointRequests(
        core, starter, archiver, autosave, elsewhere, has_remote=backends.spool is not None
    )
    transitions = Transitions(core, starter, stopper, archiver, autosave, settings)
    wanted_states = WantedStates(core, transitions, max_wait=settings.execution.max_wait)
    if core.driver.ownership is not None:
        ownership = InstanceOwnership(core.replica.background, core.driver.ownership)
        core.observers.subscribe(ownership)
    timers = SessionTimers(core, wanted_states, transitions)
    builder = SessionBuilder(core, compute.templates, provisioning, settings.session)
    creator = SessionCreator(
        core, builder, compute.pool, compute.admission, starter, autosave, checkpoint_requests
    )
    updater = SessionUpdater(core, compute.templates, builder)
    cloner = Cloner(core, creator, updater, checkpoint_requests, secrets)
    return SessionGroup(
        core.observers,
        SessionAccess(core.records, core.connections, starter),
        SessionDisruptions(core, starter),
        autosave,
        checkpoint_requests,
        transitions,
        timers,
        Activity(core.replica, core.observers),
        provisioning,
        Dependencies(core, provisioning, compute.packages),
        SessionSecrets(core, secrets),
        Sessions(core, creator, cloner, updater, wanted_states, starter),
    )
