"""
Receives everything published in Redis over one connection, and reconnects whenever it is lost.

A connection that does not answer a ping counts as lost. `on_interruption` is called then, and once
more when all channels are subscribed again, because what was published in between is lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, Any

import structlog

from atoll.coordination.redis.commands import FAILURES, complete

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.coordination.redis.commands import Commands, Wire

log = structlog.get_logger(__name__)

FIRST_DELAY, MAX_DELAY = 0.05, 2.0
"""Seconds before reconnecting, doubled each time."""


class PubSubListener:
    def __init__(
        self,
        commands: Commands,
        read_timeout: float,
        *,
        on_message: Callable[[str, str], None],
        on_interruption: Callable[[bool], None],
    ) -> None:
        self._commands = commands
        # Silence for half of it, then a ping that must be answered in the other half.
        self._ping_after = read_timeout / 2
        self._read_timeout = read_timeout
        self._receive = on_message
        self._on_interruption = on_interruption
        """Called with whether the connection is restored."""
        self._wanted: Counter[str] = Counter()
        self._asked: defaultdict[str, deque[asyncio.Future[bool]]] = defaultdict(deque)
        """For each subscription that was sent, in order: whether it was confirmed."""
        self._wire: Wire | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def disconnected(self) -> bool:
        return self._wire is None

    async def open(self, *channels: str) -> None:
        if self._task is not None:
            return
        self._wanted = Counter(channels)
        try:
            wire = await self._connected()
        except FAILURES as error:
            raise self._commands.unavailable(error) from error
        self._task = asyncio.create_task(self._keep(wire), name="redis-listener")

    async def close(self) -> None:
        task, self._task = self._task, None
        while task is not None and not task.done():
            # Repeatedly, because `wait_for`, which redis-py uses, sometimes loses a cancellation.
            task.cancel()
            await asyncio.wait({task}, timeout=FIRST_DELAY)

    async def subscribe(self, channel: str) -> None:
        """Receive what is published from now on. Undo it with `unsubscribe`, even if it failed."""
        self._wanted[channel] += 1
        wire = self._wire
        try:
            if wire is None or not wire.is_connected:
                raise ConnectionError("the connection is lost")
            confirmed = asyncio.get_running_loop().create_future()
            self._asked[channel].append(confirmed)
            await complete(_send(wire, "SUBSCRIBE", channel))
            async with asyncio.timeout(self._read_timeout):
                if not await confirmed:
                    raise ConnectionError("the connection was lost")
        except FAILURES as error:
            raise self._commands.unavailable(error) from error

    async def unsubscribe(self, channel: str) -> None:
        self._wanted[channel] -= 1
        if self._wanted[channel] > 0:
            return
        del self._wanted[channel]
        wire = self._wire
        if wire is None or not wire.is_connected:
            return
        try:
            await complete(_send(wire, "UNSUBSCRIBE", channel))
        except FAILURES:
            return  # The reading task notices it too.

    async def _keep(self, wire: Wire) -> None:
        while True:
            try:
                await self._read(wire)
            except Exception as error:  # noqa: BLE001 - without it no task would be woken
                log.warning(
                    "coordination.connection_lost", error=str(error) or type(error).__name__
                )
            finally:
                self._wire = None
                self._fail_pending()
                await wire.disconnect(nowait=True)
            self._on_interruption(False)
            wire = await self._connected_again()
            log.info("coordination.connection_restored")
            self._on_interruption(True)

    async def _connected_again(self) -> Wire:
        delay = FIRST_DELAY
        while True:
            await asyncio.sleep(delay)
            try:
                return await self._connected()
            except FAILURES as error:
                log.debug("coordination.connection_refused", error=str(error))
            delay = min(2 * delay, MAX_DELAY)

    async def _connected(self) -> Wire:
        """A connection that is subscribed to all channels."""
        wire = self._commands.wire()
        channels = set(self._wanted)
        try:
            async with asyncio.timeout(self._commands.timeout):
                await wire.connect()
                await wire.send_command("SUBSCRIBE", *channels, check_health=False)
                confirmed = 0
                while confirmed < len(channels):
                    message = await wire.read_response()
                    confirmed += message[0] == "subscribe"
                    self._dispatch(message)
                if unwanted := channels - set(self._wanted):
                    await wire.send_command("UNSUBSCRIBE", *unwanted, check_health=False)
        except BaseException:
            await wire.disconnect(nowait=True)
            raise
        self._wire = wire
        return wire

    async def _read(self, wire: Wire) -> None:
        pinged = False
        while True:
            message = await wire.read_response(timeout=self._ping_after, disconnect_on_error=False)
            if message is not None:
                pinged = False
                self._dispatch(message)
            elif pinged:
                raise ConnectionError("no answer to a ping")
            else:
                pinged = True
                await wire.send_command("PING", check_health=False)

    def _dispatch(self, message: list[Any]) -> None:
        match message:
            case ["message", channel, content]:
                self._receive(channel, content)
            case ["subscribe", channel, _] if asked := self._asked.get(channel):
                confirmed = asked.popleft()
                if not asked:
                    del self._asked[channel]
                if not confirmed.done():
                    confirmed.set_result(True)

    def _fail_pending(self) -> None:
        for asked in self._asked.values():
            for confirmed in asked:
                if not confirmed.done():
                    confirmed.set_result(False)
        self._asked.clear()


async def _send(wire: Wire, *command: str) -> None:
    # It may be closed by now. redis-py would reconnect it, and no task would read from it.
    if not wire.is_connected:
        raise ConnectionError("the connection is lost")
    await wire.send_command(*command, check_health=False)
