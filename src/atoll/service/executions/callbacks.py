"""
Stores results that executors post to the callback address, in addition to sending them over the
link.

Such a result is stored like one of the link, by compare-and-set, once. The replica that owns the
execution then finds it stored, takes it and acknowledges it. A report about an ended execution
changes nothing. An instance reports on executions of its own session only, and does not learn
whether others exist.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import InvalidRequest, NotFound, TemporaryError, VersionConflict
from atoll.link import messages
from atoll.link.errors import ProtocolViolation
from atoll.link.values import parse_value
from atoll.model.event import execution_event
from atoll.model.outcome import conclude
from atoll.model.retry import is_retried
from atoll.service.executions.event_log import EventLog

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.model.execution import Execution, Outcome
    from atoll.service.executions.commit import ResultCommit
    from atoll.service.executions.records import ExecutionRecords
    from atoll.service.replica import Replica
    from atoll.settings import ExecutionSettings

log = structlog.get_logger(__name__)

Entry = tuple[int, int, bytes]
"""Sequence number, channel and bytes."""
MAX_CONFLICTS = 5
"""Concurrent writes to the record after which the executor must report again."""


class ExecutorCallbacks:
    def __init__(
        self,
        replica: Replica,
        records: ExecutionRecords,
        commit: ResultCommit,
        settings: ExecutionSettings,
    ) -> None:
        self._store = replica.store
        self._clock = replica.clock
        self._node_id = replica.node_id
        self._records = records
        self._commit = commit
        self._settings = settings

    async def ready(self, instance_id: str) -> None:
        log.debug("instance.ready", instance_id=instance_id)

    async def status(self, instance_id: str, execution_id: str, status: str) -> None:
        """Only logged: the replica that owns the execution knows that it runs."""
        await self._owned(instance_id, execution_id)
        log.debug("execution.status_reported", execution_id=execution_id, status=status)

    async def heartbeat(self, instance_id: str, execution_id: str) -> None:
        await self._owned(instance_id, execution_id)
        log.debug("execution.heartbeat_reported", execution_id=execution_id)

    async def result(
        self, instance_id: str, execution_id: str, raw: dict[str, Any], entries: Iterable[Entry]
    ) -> bool:
        """Store a result; returns whether this report ended the execution."""
        execution = await self._owned(instance_id, execution_id)
        if execution.status.ended:
            return False
        outcome = self._outcome(execution, raw, entries)
        for _ in range(MAX_CONFLICTS):
            if is_retried(execution, outcome, self._settings.retries):
                return False  # Its owner retries it.
            secured = await self._commit.secure(execution, outcome)
            if is_retried(execution, secured, self._settings.retries):
                return False
            ended = self._ended(execution, await self._location(instance_id), outcome)
            try:
                event = execution_event(ended, ended.status, self._clock.now())
                await self._records.save(ended, event)
            except VersionConflict:
                execution = await self._owned(instance_id, execution_id)
                if execution.status.ended:
                    return False
                continue
            log.info("execution.result_reported", execution_id=execution_id)
            await self._records.announce_end(execution_id)
            return True
        raise TemporaryError(f"Execution {execution_id} keeps changing. Report the result again.")

    async def _owned(self, instance_id: str, execution_id: str) -> Execution:
        execution = await self._store.executions.get(execution_id)
        if execution is not None:
            if execution.instance_id == instance_id:
                return execution
            # The instance that replaces another reports the results in its journal.
            instance = await self._store.instances.get(instance_id)
            if instance is not None and instance.session_id == execution.session_id:
                return execution
        raise NotFound(
            f"Instance {instance_id} has no execution {execution_id}.", code="execution_not_found"
        )

    def _outcome(
        self, execution: Execution, raw: dict[str, Any], entries: Iterable[Entry]
    ) -> Outcome:
        events = EventLog(execution, self._settings)
        intake = events.intake(requested=False)
        try:
            for sequence, channel, data in entries:
                if taken := intake.take(sequence, channel, data):
                    events.append(sequence, channel, taken)
            result = messages.result(raw, intake)
        except ProtocolViolation as problem:
            raise InvalidRequest(f"Not a valid result: {problem}") from problem
        value, error = parse_value(events.value, self._settings.return_limit)
        outcome = conclude(
            result,
            stdout=events.output("stdout"),
            stderr=events.output("stderr"),
            return_json=value,
            error=error,
            # The node's counter can be read once, and the owner of the execution reads it.
            out_of_memory=False,
        )
        return events.with_log(outcome)

    async def _location(self, instance_id: str) -> tuple[str, str]:
        """Node and instance."""
        instance = await self._store.instances.get(instance_id)
        return (self._node_id if instance is None else instance.node_id), instance_id

    def _ended(
        self, execution: Execution, location: tuple[str, str], outcome: Outcome
    ) -> Execution:
        now = self._clock.now()
        started = execution.started_at
        if started is None:
            started = max(now - timedelta(seconds=outcome.execution_time), execution.created_at)
        node_id, instance_id = location
        located = dataclasses.replace(execution, instance_id=instance_id, started_at=started)
        return located.ended(outcome, at=now, node_id=node_id)
