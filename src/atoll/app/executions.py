"""Executions, invocations, contexts and consoles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.service.contexts.service import Contexts
from atoll.service.executions.approvals import Approvals
from atoll.service.executions.attempt import Attempts
from atoll.service.executions.callbacks import ExecutorCallbacks
from atoll.service.executions.completion import Completions
from atoll.service.executions.console import Consoles
from atoll.service.executions.offload import Offload
from atoll.service.executions.parts import ExecutionParts
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
    runner: Runner
    service: Executions
    consoles: Consoles
    contexts: Contexts
    invocations: Invocations
    callbacks: ExecutorCallbacks


def execution_group(backends: Backends, sessions: SessionGroup) -> ExecutionGroup:
    settings, replica, driver = backends.settings, backends.replica, backends.driver
    access, limits = sessions.access, settings.execution
    offload = Offload(backends.blobs)
    completions = Completions(replica, offload)
    shared = ExecutionParts(completions, offload, Approvals(replica, access))
    requests = RunRequests(driver, sessions.provisioning, settings)
    attempts = Attempts(replica, driver, access, offload, requests, limits)
    runner = Runner(
        replica, access, attempts, shared, sessions.autosave, sessions.observers, limits
    )
    contexts = Contexts(access, driver, sessions.provisioning)
    submitter = Submitter(replica, access, runner, offload, contexts, limits)
    service = Executions(replica, access, submitter, runner, shared, limits)
    return ExecutionGroup(
        runner,
        service,
        Consoles(service, access, replica.coordination, settings),
        contexts,
        Invocations(replica.store, service),
        ExecutorCallbacks(replica, offload, completions, limits),
    )
