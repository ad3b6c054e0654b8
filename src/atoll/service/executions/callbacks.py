"""
What executors report by themselves, besides telling it on their link.

A result that comes this way is stored like one that came by the link: by compare-and-set, once.
Whoever sees to the execution then finds it stored, and takes that. A report about an execution that
has ended changes nothing. An instance reports for executions of its own session only; of others it
is not even told that they exist.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import Conflict, InvalidRequest, NotFound, TemporaryError
from atoll.link import messages
from atoll.link.errors import ProtocolViolation
from atoll.link.values import parse_value
from atoll.model.event import execution_event
from atoll.model.outcome import conclude
from atoll.model.retry import is_retried
from atoll.service.executions.run import Run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.model.execution import Execution, Outcome
    from atoll.service.executions.completion import Completions
    from atoll.service.executions.offload import Offload
    from atoll.service.replica import Replica
    from atoll.settings import ExecutionSettings

log = structlog.get_logger(__name__)

Entry = tuple[int, int, bytes]
"""Sequence number, channel and bytes."""
RACES = 5
"""How often somebody else may write the record before this gives up and is reported again."""


class ExecutorCallbacks:
    def __init__(
        self,
        replica: Replica,
        offload: Offload,
        completions: Completions,
        settings: ExecutionSettings,
    ) -> None:
        self._store = replica.store
        self._clock = replica.clock
        self._node_id = replica.node_id
        self._offload = offload
        self._completions = completions
        self._settings = settings

    async def ready(self, instance_id: str) -> None:
        log.debug("instance.ready", instance_id=instance_id)

    async def status(self, instance_id: str, execution_id: str, status: str) -> None:
        """Not stored: that it runs is known by whoever sees to it."""
        await self._theirs(instance_id, execution_id)
        log.debug("execution.status_reported", execution_id=execution_id, status=status)

    async def heartbeat(self, instance_id: str, execution_id: str) -> None:
        await self._theirs(instance_id, execution_id)
        log.debug("execution.heartbeat_reported", execution_id=execution_id)

    async def result(
        self, instance_id: str, execution_id: str, raw: dict[str, Any], entries: Iterable[Entry]
    ) -> bool:
        """Store a result; whether it was this report that ended the execution."""
        execution = await self._theirs(instance_id, execution_id)
        if execution.status.ended:
            return False
        outcome = self._outcome(execution, raw, entries)
        for _ in range(RACES):
            if is_retried(execution, outcome, self._settings.retries):
                return False  # Not its end: whoever sees to it tries again.
            ended = self._ended(execution, await self._place(instance_id), outcome)
            try:
                event = execution_event(ended, ended.status, self._clock.now())
                await self._store.executions.save(await self._offload.put_away(ended), event=event)
            except Conflict:
                execution = await self._theirs(instance_id, execution_id)
                if execution.status.ended:
                    return False
                continue
            log.info("execution.result_reported", execution_id=execution_id)
            await self._completions.tell(execution_id)
            return True
        raise TemporaryError(f"Execution {execution_id} keeps changing; report it again.")

    async def _theirs(self, instance_id: str, execution_id: str) -> Execution:
        execution = await self._store.executions.get(execution_id)
        if execution is not None:
            if execution.instance_id == instance_id:
                return execution
            # One that was replaced leaves its results to the next of the same session.
            instance = await self._store.instances.get(instance_id)
            if instance is not None and instance.session_id == execution.session_id:
                return execution
        raise NotFound(
            f"Instance {instance_id} has no execution {execution_id}.", code="execution_not_found"
        )

    def _outcome(
        self, execution: Execution, raw: dict[str, Any], entries: Iterable[Entry]
    ) -> Outcome:
        heard = Run(execution)
        intake = heard.bounded(self._settings, requested=False)
        try:
            for sequence, channel, data in entries:
                if taken := intake.take(sequence, channel, data):
                    heard.output(sequence, channel, taken)
            result = messages.result(raw, intake)
        except ProtocolViolation as problem:
            raise InvalidRequest(f"This is not the result of a run: {problem}") from problem
        value, error = parse_value(bytes(heard.value), self._settings.return_limit)
        outcome = conclude(
            result,
            stdout=heard.gathered("stdout"),
            stderr=heard.gathered("stderr"),
            return_json=value,
            error=error,
            # The node's counter is for whoever sees to the execution: it tells once.
            out_of_memory=False,
        )
        return heard.with_log(outcome)

    async def _place(self, instance_id: str) -> tuple[str, str]:
        """Node and instance."""
        instance = await self._store.instances.get(instance_id)
        return (self._node_id if instance is None else instance.node_id), instance_id

    def _ended(self, execution: Execution, place: tuple[str, str], outcome: Outcome) -> Execution:
        now = self._clock.now()
        started = execution.started_at
        if started is None:
            started = max(now - timedelta(seconds=outcome.execution_time), execution.created_at)
        node_id, instance_id = place
        there = dataclasses.replace(execution, instance_id=instance_id, started_at=started)
        return there.ended(outcome, at=now, node_id=node_id)
