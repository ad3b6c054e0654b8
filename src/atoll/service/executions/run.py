"""
An execution in flight: its phase, its events, and the clients that wait for it.

Only the methods of `Run` change its state. A stop (a cancellation, or the end or stop of its
session) interrupts the waits for slots, leases and other executions, and the pause before a retry;
a start of the session is shared with other requests, and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from atoll.model.execution import Execution, ExecutionStatus, Request
from atoll.model.stream_event import StreamEvent
from atoll.service.executions import event_log
from atoll.service.executions.event_log import EventLog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator
    from datetime import datetime, timedelta

    from atoll.model.session import Session
    from atoll.service.background import BackgroundTasks
    from atoll.service.executions.slots import Slot
    from atoll.settings import ExecutionSettings


class Phase(StrEnum):
    QUEUED = "queued"
    """Waits for a slot of the session on this replica, before an attempt."""
    LEASING = "leasing"
    """Has the slot; waits for its lease, or for an execution of another replica."""
    CONNECTING = "connecting"
    """Has the lease; the session is connected to, and started if need be."""
    DISPATCHED = "dispatched"
    """Sent to the executor; output may arrive."""
    UNCERTAIN = "uncertain"
    """An executor may have it, from an interrupted attempt or another replica: it is looked for."""
    BACKOFF = "backoff"
    """An attempt was lost; the next one is due after a pause."""
    COMMITTING = "committing"
    """The outcome is known and is being stored."""
    HANDED_OVER = "handed_over"
    """Another replica owns the execution; only its end is awaited here."""
    DONE = "done"


class Interrupted(Exception):
    """The run was stopped while it waited for other executions."""


class QuestionObserver(Protocol):
    def question_changed(self, run: Run, question: dict[str, Any]) -> None:
        """User code has asked a question, or the executor reports its outcome."""


class Run:
    """One execution in flight on this replica. Implements the link's `RunListener`."""

    def __init__(
        self,
        execution: Execution,
        settings: ExecutionSettings,
        *,
        questions: QuestionObserver | None = None,
        from_record: bool = False,
    ) -> None:
        self._execution = execution
        self.events = EventLog(execution, settings)
        self._questions = questions
        self.from_record = from_record
        """
        Whether the execution was read from its record: it may have started already, and the record
        may have only the beginning of its request.
        """
        self._phase = Phase.UNCERTAIN if from_record else Phase.QUEUED
        self._slot: Slot | None = None
        self._task: asyncio.Task[Any] | None = None
        self._waiting: asyncio.Task[Any] | None = None
        """The task that a stop has to interrupt."""
        self._interrupted = False
        self._cancelled = False
        self._cancel_reason: str | None = None
        self._stopped_by: Session | None = None
        self._stopping = asyncio.Event()
        self._changed = asyncio.Event()
        self._heartbeats = 0
        self._done: asyncio.Future[Execution] = asyncio.get_running_loop().create_future()

    @property
    def id(self) -> str:
        return self._execution.id

    @property
    def execution(self) -> Execution:
        """The record, with what is known here beyond it."""
        return self._execution

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def finished(self) -> bool:
        return self._phase is Phase.DONE

    @property
    def queue_position(self) -> int | None:
        """How many executions are before it; null when it waits for none."""
        if self._slot is None or self._execution.started_at is not None:
            return None
        if self._slot.waiting:
            return self._slot.position
        return 1 if self._phase is Phase.LEASING else None

    # Stops

    @property
    def stopped(self) -> bool:
        return self._cancelled or self._stopped_by is not None

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    @property
    def cancel_reason(self) -> str | None:
        return self._cancel_reason

    @property
    def stopped_by(self) -> Session | None:
        """The session, if its end or stop ends the execution."""
        return self._stopped_by

    def cancel(self, reason: str | None) -> None:
        """Stop at the next chance; the executor is asked separately. The first reason counts."""
        if not self._cancelled:
            self._cancelled, self._cancel_reason = True, reason
        self._interrupt()

    def stop_with(self, session: Session) -> None:
        """Stop, because its session has ended or was stopped."""
        self._stopped_by = session
        self._interrupt()

    def _interrupt(self) -> None:
        self._stopping.set()
        if self._slot is not None:
            self._slot.give_up()
        if self._waiting is not None and not self._interrupted:
            self._interrupted = True
            self._waiting.cancel()

    # Phases

    def begin(
        self, work: Coroutine[Any, Any, None], background: BackgroundTasks, slot: Slot
    ) -> None:
        """Start `work`, which drives the run; `slot` is the place of the run in the queue."""
        self._slot = slot
        self._task = background.start(work, f"run {self.id}")

    def notify(self) -> None:
        """Wake the clients that follow the events."""
        self._changed.set()

    @contextlib.contextmanager
    def waiting_for_others(self) -> Iterator[None]:
        """Phase `LEASING`; a stop raises `Interrupted` from the block."""
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        self._phase, self._waiting = Phase.LEASING, task
        try:
            yield
        except asyncio.CancelledError:
            # Any other cancellation propagates.
            if not self._interrupted or task.uncancel() > before:
                raise
            raise Interrupted from None
        finally:
            self._phase, self._waiting, self._interrupted = Phase.CONNECTING, None, False

    def dispatched(self, request: Request, instance_id: str, at: datetime) -> None:
        """The execution is about to be sent to the executor of an instance."""
        self._phase = Phase.DISPATCHED
        self._execution = dataclasses.replace(
            self._execution, request=request, instance_id=instance_id, started_at=at
        )

    def refused(self) -> None:
        """The executor has not taken the execution."""
        self._phase = Phase.QUEUED
        self._execution = dataclasses.replace(self._execution, started_at=None)

    def located(self, instance_id: str | None, started_at: datetime | None) -> None:
        """Where the execution runs, and since when, as far as is known after a takeover."""
        self._execution = dataclasses.replace(
            self._execution, instance_id=instance_id, started_at=started_at
        )

    def placed(self, stored: Execution) -> None:
        """The instance of the next attempt was recorded."""
        self._execution = stored

    def version_read(self, version: int) -> None:
        """The record has this version, whichever write of this replica made it."""
        self._execution = dataclasses.replace(self._execution, version=version)

    def interrupted(self) -> None:
        """The attempt was interrupted: whether an executor has the execution is to be found out."""
        assert not self.finished
        if self._execution.started_at is not None:
            self._phase = Phase.UNCERTAIN
        elif self._phase is not Phase.UNCERTAIN:
            self._phase = Phase.QUEUED

    def not_started(self) -> None:
        """No executor has the execution: it may be dispatched."""
        self._phase = Phase.QUEUED
        self._execution = dataclasses.replace(self._execution, started_at=None)

    def committing(self) -> None:
        self._phase = Phase.COMMITTING

    def next_attempt(self, execution: Execution, details: dict[str, Any]) -> None:
        """Count a recorded retry, of this replica or of the one that owns the execution."""
        self._execution = execution
        self.events.next_attempt(execution.retry_count, details)
        self.notify()

    async def back_off(self, pause: timedelta) -> None:
        """Wait before the next attempt, unless the run is stopped."""
        self._phase = Phase.BACKOFF
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause.total_seconds()):
                await self._stopping.wait()
        self._phase = Phase.QUEUED

    def follow(self, work: Coroutine[Any, Any, None], background: BackgroundTasks) -> None:
        """
        Start `work`, which waits for the replica that owns the execution and then ends the run.
        """
        self._phase = Phase.HANDED_OVER
        self._task = background.start(work, f"await {self.id}", waits=True)

    def detach(self) -> asyncio.Task[Any] | None:
        """Stop driving or following it; the execution itself continues."""
        if self._task is not None:
            self._task.cancel()
        return self._task

    def finish(self, execution: Execution) -> None:
        self._execution, self._phase = execution, Phase.DONE
        if not self._done.done():
            self._done.set_result(execution)
        self.notify()

    def finish_from_record(self, ended: Execution) -> None:
        """Finish with a result that another replica has stored."""
        self.events.complete(ended)
        self.finish(ended)

    def leave_slot(self) -> None:
        if self._slot is not None:
            self._slot.leave()

    @property
    def slot_number(self) -> int:
        assert self._slot is not None
        return self._slot.number

    async def wait_for_slot(self) -> None:
        assert self._slot is not None
        await self._slot.wait()

    # Reports of the executor

    def started(self) -> None:
        if self._phase is Phase.UNCERTAIN:
            self._phase = Phase.DISPATCHED
        if self.events.started():
            # Its record may have the status already.
            self._execution = dataclasses.replace(self._execution, status=ExecutionStatus.RUNNING)
            self.notify()

    def output(self, sequence: int, channel: int, data: bytes) -> None:
        questions = self.events.append(sequence, channel, data)
        self.notify()
        if self._questions is not None:
            for question in questions:
                self._questions.question_changed(self, question)

    def heartbeat(self) -> None:
        self._heartbeats += 1
        self.notify()

    # Clients

    async def wait(self, seconds: float) -> Execution:
        """The execution when it has ended, or its current state after so many seconds."""
        if seconds > 0 and not self.finished:
            await asyncio.wait([self._done], timeout=seconds)
        return self._execution

    async def stream(self, after: int) -> AsyncIterator[StreamEvent]:
        """Events after number `after`, until the one named `result`."""
        position, heartbeats, queue_position = 0, self._heartbeats, None
        while True:
            self._changed.clear()
            while position < self.events.end:
                position, events = self.events.since(position)
                position += len(events)
                for event in events:
                    if (event.number or 0) > after:
                        yield event
            if self.finished:
                break
            if self.queue_position != queue_position:
                queue_position = self.queue_position
                if queue_position is not None:
                    yield StreamEvent(None, "queued", {"ahead": queue_position})
                    continue  # Another reader may have cleared the flag meanwhile.
            if self._heartbeats != heartbeats:
                heartbeats = self._heartbeats
                yield StreamEvent(None, "heartbeat", {})
                continue
            await self._changed.wait()
        if self._execution.outcome is not None:
            last = event_log.result_number(self._execution.retry_count)
            if last > after:
                yield StreamEvent(last, "result", self._execution)
