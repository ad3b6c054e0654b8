"""Executions, invocations, contexts and consoles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.service.contexts.service import Contexts
from atoll.service.executions.approvals import Approvals
from atoll.service.executions.attempt import Attempts
from atoll.service.executions.callbacks import ExecutorCallbacks
from atoll.service.executions.commit import ResultCommit
from atoll.service.executions.console import Consoles
from atoll.service.executions.offload import Offload
from atoll.service.executions.records import ExecutionRecords
from atoll.service.executions.run_request import RunRequests
from atoll.service.executions.runner import Runner
from atoll.service.executions.service import Executions
from atoll.service.executions.submit import Submitter
from atoll.service.invocations.service import Invocations

if TYPE_CHECKING:
    from atoll.app.backends import Backends
    from atoll.app.sessions import SessionGroup


@dataclass(frozen=True)
class ExecutionGroup:
    records: ExecutionRecords
    runner: Runner
    commit: ResultCommit
    service: Executions
    consoles: Consoles
    contexts: Contexts
    invocations: Invocations
    callbacks: ExecutorCallbacks


def execution_group(backends: Backends, sessions: SessionGroup) -> ExecutionGroup:
    settings, replica, driver = backends.settings, backends.replica, backends.driver
    access, limits = sessions.access, settings.execution
    records = ExecutionRecords(replica, Offload(backends.blobs))
    approvals = Approvals(replica, access)
    requests = RunRequests(driver, sessions.provisioning, settings)
    attempts = Attempts(replica, driver, access, records, requests, limits)
    commit = ResultCommit(replica, records, access.connections, sessions.autosave, approvals)
    runner = Runner(replica, access, records, attempts, commit, approvals, limits)
    sessions.observers.subscribe(runner)
    replica.coordination.subscribe(runner)
    contexts = Contexts(access, driver, sessions.provisioning)
    submitter = Submitter(replica, access, records, runner, contexts, limits)
    service = Executions(replica, access, submitter, runner, records, approvals, limits)
    return ExecutionGroup(
        records,
        runner,
        commit,
        service,
        Consoles(service, access, replica.coordination, settings),
        contexts,
        Invocations(replica.store, service),
        ExecutorCallbacks(replica, records, commit, limits),
    )
