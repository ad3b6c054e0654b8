"""
Consoles: those who watch an execution as it runs, and the one of them who types.

A console may be opened on any replica that reaches the session. What the executor still has of the
output is replayed, then it goes on live, at the pace of who reads: no more waits here than a window
of the link and a few pieces, and who is too slow misses what the executor has dropped meanwhile. A
link that breaks is taken up again behind the last piece. The end comes from the record, when it is
stored.

One types at a time: who came first, over all replicas; the others stand in line. The right is a
lease, so it outlives neither its console nor its replica by long.
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
QUEUED = 4
"""Pieces that wait for who reads."""
AGAIN_SECONDS = 0.25
"""Pause before a link that broke is taken up again; it doubles while there is none to be had."""
MOST_SECONDS = 4.0
LOOK_SECONDS = 60.0
IN_LINE_SECONDS = 3600.0
ASKED_SECONDS = 2.0
"""The longest wait for the answer to who types."""
FULL_SECONDS = 0.05
"""Pause while the executor takes no more input."""
STALLED_SECONDS = 5.0
"""How long a run that is recorded as ended may be silent and still be listened to."""
_ATTEMPT = 32


@dataclass(frozen=True, slots=True)
class Output:
    channel: int
    data: bytes
    position: int
    """Grows with each piece; given as `after`, a later console goes on behind this one."""


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
        self, execution_id: str, *, after: int = 0, may_type: bool = True, in_line: bool = True
    ) -> AsyncIterator[Console]:
        """
        A console of an execution, from behind position `after` on. One that is not `in_line` only
        watches, and so does one that may not type.
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
            async with console.playing(in_line=may_type and in_line):
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
        self._items: asyncio.Queue[Output | State | Execution | AtollError] = asyncio.Queue(QUEUED)
        self._attempt, self._sequence = after >> _ATTEMPT, after & ((1 << _ATTEMPT) - 1)
        self._instance: str | None = None
        self._begun = False
        """Whether the run that is followed has begun."""
        self._status = execution.status
        self._in_line = False
        self._typing = False
        self._asked = asyncio.Event()
        """Set when it is known whether this one types."""
        self._told: State | None = None
        self._size: tuple[int, int] | None = None

    @property
    def typing(self) -> bool:
        return self._typing

    @property
    def terminal(self) -> bool:
        return self._execution.request.terminal is not None

    # Watching

    async def events(self) -> AsyncIterator[Output | State | Execution]:
        """What happens; the last one is the execution as it ended."""
        while True:
            item = await self._items.get()
            if isinstance(item, AtollError):
                raise item
            yield item
            if isinstance(item, Execution):
                return

    @asynccontextmanager
    async def playing(self, *, in_line: bool) -> AsyncIterator[None]:
        self._in_line = in_line
        work = [asyncio.create_task(self._play(), name=f"console of {self._execution.id}")]
        if in_line and not self._status.ended:
            work.append(asyncio.create_task(self._stand_in_line()))
        else:
            self._asked.set()
        try:
            # Who was let in first is first in line.
            await self._until_asked()
            yield
        finally:
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    async def _play(self) -> None:
        await self._until_asked()
        await self._tell()
        ending = asyncio.create_task(self._end())
        heard_all, pause = False, AGAIN_SECONDS
        try:
            while not ending.done() and not heard_all:
                following = asyncio.create_task(self._follow())
                try:
                    heard_all = await self._heard_out(following, ending)
                except AtollError as error:
                    log.debug("console.lost", execution_id=self._execution.id, error=error.message)
                finally:
                    following.cancel()
                if not heard_all:
                    pause = AGAIN_SECONDS if self._begun else min(pause * 2, MOST_SECONDS)
                    await asyncio.wait([ending], timeout=pause)
            ended = await ending
            if ended.retry_count != self._attempt:
                heard_all, self._sequence = False, 0
                self._attempt = ended.retry_count
            if not heard_all:
                for sequence, channel, data in rest(ended, self._sequence):
                    await self._items.put(Output(channel, data, self._position(sequence)))
            await self._items.put(ended)
        except AtollError as error:
            await self._items.put(error)
        except Exception as error:  # Whoever waits for it must not wait for ever.
            log.error("console.broke", execution_id=self._execution.id, exc_info=error)
            await self._items.put(AtollError("Something broke here.", code="internal_error"))
        finally:
            ending.cancel()

    async def _heard_out(
        self, following: asyncio.Task[bool], ending: asyncio.Task[Execution]
    ) -> bool:
        """Whether the run was heard to its end; what is left of it is, also after its record."""
        await asyncio.wait([following, ending], return_when=asyncio.FIRST_COMPLETED)
        while not following.done() and self._begun:
            before = self._sequence
            await asyncio.wait([following], timeout=STALLED_SECONDS)
            if self._sequence == before and not self._items.full():
                break
        return following.done() and await following

    async def _follow(self) -> bool:
        """Hear the run as long as the link lasts; whether to its end."""
        self._begun = False
        execution = await self._executions.get(self._execution.id)
        connection = None
        if not execution.status.ended:
            connection = await self._sessions.connections.reach(execution.session_id)
        if connection is None:
            return False
        moved = self._instance not in (None, connection.instance.id)
        if moved:
            # Reaching it took its time.
            execution = await self._executions.get(self._execution.id)
            if self._sequence and execution.retry_count == self._attempt:
                return False  # It is not tried again there, or not yet.
        if moved or execution.retry_count != self._attempt:
            self._attempt, self._sequence = execution.retry_count, 0
        self._instance = connection.instance.id
        if not moved:
            await self._tell(execution.status)
        else:
            await self._tell(ExecutionStatus.PENDING)
        async for item in connection.link.watch(execution.id, self._sequence, expected=True):
            if isinstance(item, Piece):
                self._sequence = item.sequence
                if item.channel in (frames.STDOUT, frames.STDERR):
                    position = self._position(item.sequence)
                    await self._items.put(Output(item.channel, item.data, position))
            elif item["event"] == "started":
                self._begun = True
                await self._tell(ExecutionStatus.RUNNING)
                await self._apply_size()
            elif item["event"] == "end":
                return True
        return False

    async def _end(self) -> Execution:
        while True:
            try:
                execution = await self._executions.wait(self._execution.id, LOOK_SECONDS)
                if execution.status.ended:
                    return execution
            except NotFound:
                raise
            except TemporaryError:
                await asyncio.sleep(AGAIN_SECONDS)

    def _position(self, sequence: int) -> int:
        return self._attempt << _ATTEMPT | sequence

    async def _tell(self, status: ExecutionStatus | None = None) -> None:
        self._status = status or self._status
        state = State(self._status, self._attempt, self._typing)
        if state != self._told:
            self._told = state
            await self._items.put(state)

    # Typing

    async def _until_asked(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(ASKED_SECONDS):
                await self._asked.wait()

    async def _stand_in_line(self) -> None:
        wait = 0.0
        while True:
            try:
                since = asyncio.get_running_loop().time()
                taken = await self._coordination.acquire(self._key, self._owner, wait=wait)
                wait = IN_LINE_SECONDS
                self._typing = taken is None
                self._asked.set()
                if taken is not None:
                    continue
                try:
                    await self._hold()
                finally:
                    self._typing = False
                    with suppress(TemporaryError):
                        await asyncio.shield(self._coordination.release(self._key, self._owner))
                await self._tell()
            except TemporaryError:
                # A back-end that is away may say so without any delay.
                passed = asyncio.get_running_loop().time() - since
                await asyncio.sleep(max(0.0, 1.0 - passed))

    async def _hold(self) -> None:
        """Keep the right to type as long as it lasts."""
        await self._tell()
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
        await self._until_asked()
        if not self._typing:
            words = "You are in line." if self._in_line else "This console only watches."
            raise Conflict(
                f"Somebody else may type to execution {self._execution.id}. {words}",
                code="console_taken",
            )

    async def type(self, data: bytes, *, eof: bool = False) -> None:
        """Input, in order; waits while the execution does not take what came before."""
        await self._check()
        text = base64.b64encode(data).decode()
        while True:
            try:
                await self._call("stdin", data=text, eof=eof)
                return
            except StdinFull:
                pass
            await asyncio.sleep(FULL_SECONDS)

    async def resize(self, rows: int, columns: int) -> None:
        """The terminal is as large as that of the one who types."""
        self._size = (rows, columns)
        await self._apply_size()

    async def _apply_size(self) -> None:
        if self._size is None or not self._typing or not self.terminal:
            return
        rows, columns = self._size
        with suppress(AtollError):  # Not there yet, or no more: there is another occasion, or none.
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
                "The line to the sandbox broke: this may or may not have arrived.",
                code="link_lost",
            ) from error
        except RunNotActive:
            pass
        raise Conflict(
            f"Execution {self._execution.id} does not run now.",
            code="execution_not_running",
            status_now=self._status.value,
        )


def rest(execution: Execution, after: int) -> Iterator[tuple[int, int, bytes]]:
    """
    What a record has of the output behind sequence number `after`: sequence, channel and bytes of
    each piece.
    """
    channels = {name: channel for channel, name in event_log.OUTPUTS.items()}
    for event in event_log.replay(execution):
        if event.name in channels and isinstance(event.content, bytes):
            sequence = (event.number or 0) - event_log.of_entry(execution.retry_count, 0)
            if sequence > after:
                yield sequence, channels[event.name], event.content
