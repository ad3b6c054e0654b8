"""
Consoles: clients that watch an execution, one of which may type.

A console may be opened on any replica that reaches the session. Output that the executor still has
is replayed, then new output follows at the pace of the client: at most a window of the link and a
few pieces wait here, and a slow client misses what the executor has dropped meanwhile. A broken
link is replaced, and output continues after the last piece. The end comes from the stored record.

One console at a time may type: the first one, over all replicas; the others wait for it. The right
is a lease, so it is free soon after its console or replica is gone.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections import Counter
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from atoll.errors import AtollError, Conflict, Forbidden, NotFound, TemporaryError
from atoll.link.client import Piece
from atoll.link.errors import LinkLost, RunNotActive, StdinFull
from atoll.model.execution import Execution, ExecutionStatus
from atoll.protocol import frames
from atoll.service.executions import event_log

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from atoll.coordination.base import Coordination
    from atoll.service.executions.service import Executions
    from atoll.service.sessions.access import SessionAccess
    from atoll.service.sessions.connections import Connection
    from atoll.settings import Settings

log = structlog.get_logger(__name__)

MAX_CONSOLES = 64
"""Consoles of one execution on one replica."""
MAX_QUEUED = 4
"""Pieces that wait for the client."""
RECONNECT_PAUSE = 0.25
"""Seconds before a broken link is replaced; they double up to `MAX_RECONNECT_PAUSE`."""
MAX_RECONNECT_PAUSE = 4.0
END_WAIT = 60.0
"""Seconds of one wait for the end of the execution."""
TYPING_WAIT = 3600.0
"""Seconds of one wait for the right to type."""
FIRST_TYPING_WAIT = 2.0
"""Seconds until it is known, as a rule, whether this console may type."""
STDIN_FULL_PAUSE = 0.05
"""Seconds between two tries to write to a full stdin."""
SILENCE_LIMIT = 5.0
"""Seconds of silence after which an execution that is recorded as ended is not followed."""
_ATTEMPT_BITS = 32


@dataclass(frozen=True, slots=True)
class Output:
    channel: int
    data: bytes
    position: int
    """Grows with each piece; as `after`, it lets another console continue after this piece."""


@dataclass(frozen=True, slots=True)
class State:
    status: ExecutionStatus
    attempt: int
    typing: bool


class Consoles:
    def __init__(
        self,
        executions: Executions,
        sessions: SessionAccess,
        coordination: Coordination,
        settings: Settings,
    ) -> None:
        self._executions = executions
        self._sessions = sessions
        self._coordination = coordination
        self._settings = settings
        self._open: Counter[str] = Counter()

    @asynccontextmanager
    async def open(
        self, execution_id: str, *, after: int = 0, may_type: bool = True, may_wait: bool = True
    ) -> AsyncIterator[Console]:
        """
        A console of an execution, with output after position `after`. It only watches if it may not
        type, or may not wait for the right to type.
        """
        execution = await self._executions.get(execution_id)
        if self._open[execution_id] >= MAX_CONSOLES:
            raise TemporaryError(
                f"{MAX_CONSOLES} consoles are open on execution {execution_id}.",
                code="too_many_consoles",
                retry_after=10,
            )
        self._open[execution_id] += 1
        console = Console(
            execution,
            after,
            may_type,
            executions=self._executions,
            sessions=self._sessions,
            coordination=self._coordination,
            lease_seconds=self._settings.coordination.lease_ttl.total_seconds(),
        )
        try:
            async with console.running(may_wait=may_type and may_wait):
                yield console
        finally:
            self._open[execution_id] -= 1
            if not self._open[execution_id]:
                del self._open[execution_id]


class Console:
    def __init__(
        self,
        execution: Execution,
        after: int,
        may_type: bool,
        *,
        executions: Executions,
        sessions: SessionAccess,
        coordination: Coordination,
        lease_seconds: float,
    ) -> None:
        self._execution = execution
        self._may_type = may_type
        self._executions = executions
        self._sessions = sessions
        self._coordination = coordination
        self._lease_seconds = lease_seconds
        self._key = f"console:{execution.id}"
        self._owner = secrets.token_hex(10)
        self._items: asyncio.Queue[Output | State | Execution | AtollError] = asyncio.Queue(
            MAX_QUEUED
        )
        self._attempt, self._sequence = after >> _ATTEMPT_BITS, after & ((1 << _ATTEMPT_BITS) - 1)
        self._instance: str | None = None
        self._begun = False
        """Whether the execution that is followed has started."""
        self._status = execution.status
        self._may_wait = False
        self._typing = False
        self._typing_known = asyncio.Event()
        """Set when it is known whether this console may type."""
        self._reported: State | None = None
        self._size: tuple[int, int] | None = None

    @property
    def typing(self) -> bool:
        return self._typing

    @property
    def terminal(self) -> bool:
        return self._execution.request.terminal is not None

    # Watching

    async def events(self) -> AsyncIterator[Output | State | Execution]:
        """Output and states; the last item is the ended execution."""
        while True:
            item = await self._items.get()
            if isinstance(item, AtollError):
                raise item
            yield item
            if isinstance(item, Execution):
                return

    @asynccontextmanager
    async def running(self, *, may_wait: bool) -> AsyncIterator[None]:
        self._may_wait = may_wait
        work = [asyncio.create_task(self._play(), name=f"console of {self._execution.id}")]
        if may_wait and not self._status.ended:
            work.append(asyncio.create_task(self._wait_to_type()))
        else:
            self._typing_known.set()
        try:
            # The console that was opened first is the first to type.
            await self._until_typing_known()
            yield
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _play(self) -> None:
        await self._until_typing_known()
        await self._report()
        ending = asyncio.create_task(self._end())
        followed, pause = False, RECONNECT_PAUSE
        try:
            while not ending.done() and not followed:
                following = asyncio.create_task(self._follow())
                try:
                    followed = await self._follow_to_end(following, ending)
                except AtollError as error:
                    log.debug(
                        "console.link_lost", execution_id=self._execution.id, error=error.message
                    )
                finally:
                    following.cancel()
                if not followed:
                    pause = RECONNECT_PAUSE if self._begun else min(pause * 2, MAX_RECONNECT_PAUSE)
                    await asyncio.wait([ending], timeout=pause)
            ended = await ending
            if ended.retry_count != self._attempt:
                followed, self._sequence = False, 0
                self._attempt = ended.retry_count
            if not followed:
                for sequence, channel, data in rest(ended, self._sequence):
                    await self._items.put(Output(channel, data, self._position(sequence)))
            await self._items.put(ended)
        except AtollError as error:
            await self._items.put(error)
        except Exception as error:  # The client must not wait forever.
            log.error("console.internal_error", execution_id=self._execution.id, exc_info=error)
            await self._items.put(
                AtollError("Internal error. See the server log.", code="internal_error")
            )
        finally:
            ending.cancel()

    async def _follow_to_end(
        self, following: asyncio.Task[bool], ending: asyncio.Task[Execution]
    ) -> bool:
        """Whether all output has arrived; what is left of it may come after the record."""
        await asyncio.wait([following, ending], return_when=asyncio.FIRST_COMPLETED)
        while not following.done() and self._begun:
            before = self._sequence
            await asyncio.wait([following], timeout=SILENCE_LIMIT)
            if self._sequence == before and not self._items.full():
                break
        return following.done() and await following

    async def _follow(self) -> bool:
        """Follow the execution as long as the link lasts; whether to its end."""
        self._begun = False
        execution = await self._executions.get(self._execution.id)
        connection = None
        if not execution.status.ended:
            connection = await self._sessions.connections.reach(execution.session_id)
        if connection is None:
            return False
        moved = self._instance not in (None, connection.instance.id)
        if moved:
            # Time has passed since the record was read.
            execution = await self._executions.get(self._execution.id)
            if self._sequence and execution.retry_count == self._attempt:
                return False  # The execution was not retried in that instance, or not yet.
        if moved or execution.retry_count != self._attempt:
            self._attempt, self._sequence = execution.retry_count, 0
        self._instance = connection.instance.id
        if not moved:
            await self._report(execution.status)
        else:
            await self._report(ExecutionStatus.PENDING)
        async for item in connection.link.watch(execution.id, self._sequence, expected=True):
            if isinstance(item, Piece):
                self._sequence = item.sequence
                if item.channel in (frames.STDOUT, frames.STDERR):
                    position = self._position(item.sequence)
                    await self._items.put(Output(item.channel, item.data, position))
            elif item["event"] == "started":
                self._begun = True
                await self._report(ExecutionStatus.RUNNING)
                await self._apply_size()
            elif item["event"] == "end":
                return True
        return False

    async def _end(self) -> Execution:
        while True:
            try:
                execution = await self._executions.wait(self._execution.id, END_WAIT)
                if execution.status.ended:
                    return execution
            except NotFound:
                raise
            except TemporaryError:
                await asyncio.sleep(RECONNECT_PAUSE)

    def _position(self, sequence: int) -> int:
        return self._attempt << _ATTEMPT_BITS | sequence

    async def _report(self, status: ExecutionStatus | None = None) -> None:
        self._status = status or self._status
        state = State(self._status, self._attempt, self._typing)
        if state != self._reported:
            self._reported = state
            await self._items.put(state)

    # Typing

    async def _until_typing_known(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_TYPING_WAIT):
                await self._typing_known.wait()

    async def _wait_to_type(self) -> None:
        wait = 0.0
        while True:
            try:
                since = asyncio.get_running_loop().time()
                taken = await self._coordination.acquire(self._key, self._owner, wait=wait)
                wait = TYPING_WAIT
                self._typing = taken is None
                self._typing_known.set()
                if taken is not None:
                    continue
                try:
                    await self._hold()
                finally:
                    self._typing = False
                    with suppress(TemporaryError):
                        await asyncio.shield(self._coordination.release(self._key, self._owner))
                await self._report()
            except TemporaryError:
                # A back-end may report that it is unavailable without any delay.
                passed = asyncio.get_running_loop().time() - since
                await asyncio.sleep(max(0.0, 1.0 - passed))

    async def _hold(self) -> None:
        """Keep the right to type for as long as possible."""
        await self._report()
        await self._apply_size()
        now = asyncio.get_running_loop().time
        until = now() + self._lease_seconds
        while now() < until:
            await asyncio.sleep(self._lease_seconds / 3)
            since = now()
            try:
                if not await self._coordination.renew(self._key, self._owner):
                    return
                until = since + self._lease_seconds
            except TemporaryError as error:
                log.info("console.not_renewed", key=self._key, error=error.message)

    async def _check(self) -> None:
        if not self._may_type:
            raise Forbidden("This API key may only read.", code="key_read_only")
        await self._until_typing_known()
        if not self._typing:
            hint = "You will be next." if self._may_wait else "This console only watches."
            raise Conflict(
                f"Another console types to execution {self._execution.id}. {hint}",
                code="console_taken",
            )

    async def type(self, data: bytes, *, eof: bool = False) -> None:
        """Send input; waits while the execution has not read earlier input."""
        await self._check()
        text = base64.b64encode(data).decode()
        while True:
            try:
                await self._call("stdin", data=text, eof=eof)
                return
            except StdinFull:
                pass
            await asyncio.sleep(STDIN_FULL_PAUSE)

    async def resize(self, rows: int, columns: int) -> None:
        """The terminal gets the size of the typing client's."""
        self._size = (rows, columns)
        await self._apply_size()

    async def _apply_size(self) -> None:
        if self._size is None or not self._typing or not self.terminal:
            return
        rows, columns = self._size
        with suppress(AtollError):  # It has not started yet, or has ended.
            await self._call("resize", rows=rows, cols=columns)

    async def signal(self, number: int) -> None:
        await self._check()
        await self._call("signal", signal=number)

    async def end(self) -> None:
        """Cancel the execution."""
        if not self._may_type:
            raise Forbidden("This API key may only read.", code="key_read_only")
        await self._executions.cancel(self._execution.id)

    async def _call(self, op: str, **fields: Any) -> None:
        connection: Connection | None = None
        with suppress(Conflict):  # The session has ended.
            connection = await self._sessions.connections.reach(self._execution.session_id)
        try:
            if connection is not None:
                await connection.link.call(op, id=self._execution.id, **fields)
                return
        except LinkLost as error:
            raise TemporaryError(
                "The connection to the sandbox broke. The input may or may not have arrived.",
                code="link_lost",
            ) from error
        except RunNotActive:
            pass
        raise Conflict(
            f"Execution {self._execution.id} is not running.",
            code="execution_not_running",
            status_now=self._status.value,
        )


def rest(execution: Execution, after: int) -> Iterator[tuple[int, int, bytes]]:
    """
    Output of a record after sequence number `after`: sequence, channel and bytes of each piece.
    """
    channels = {name: channel for channel, name in event_log.OUTPUTS.items()}
    for event in event_log.replay(execution):
        if event.name in channels and isinstance(event.content, bytes):
            sequence = (event.number or 0) - event_log.of_entry(execution.retry_count, 0)
            if sequence > after:
                yield sequence, channels[event.name], event.content
