"""
What is heard from Redis: one connection for all that is published, kept up for good.

A connection that does not answer counts as lost. Then, and once more when all channels are
subscribed to again, `missed` is called, because what was published in between is gone.
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

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds before connecting again, doubled each time."""


class Ear:
    def __init__(
        self,
        commands: Commands,
        read_timeout: float,
        *,
        hear: Callable[[str, str], None],
        missed: Callable[[bool], None],
    ) -> None:
        self._commands = commands
        # Quiet for half of it, then a ping that is answered in the other half.
        self._quiet = read_timeout / 2
        self._read_timeout = read_timeout
        self._hear = hear
        self._missed = missed
        """Given whether the connection is there again."""
        self._wanted: Counter[str] = Counter()
        self._asked: defaultdict[str, deque[asyncio.Future[bool]]] = defaultdict(deque)
        """For each subscription that was sent, whether it was confirmed, in order."""
        self._wire: Wire | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def deaf(self) -> bool:
        return self._wire is None

    async def open(self, *channels: str) -> None:
        if self._task is not None:
            return
        self._wanted = Counter(channels)
        try:
            wire = await self._connected()
        except FAILURES as error:
            raise self._commands.unavailable(error) from error
        self._task = asyncio.create_task(self._keep(wire), name="redis-ear")

    async def close(self) -> None:
        task, self._task = self._task, None
        while task is not None and not task.done():
            # Again and again, since `wait_for`, which redis-py uses, loses one now and then.
            task.cancel()
            await asyncio.wait({task}, timeout=FIRST_PAUSE)

    async def subscribe(self, channel: str) -> None:
        """Hear what is published from now on. Undone by `unsubscribe`, also after a failure."""
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
            return  # The reader notices too.

    async def _keep(self, wire: Wire) -> None:
        while True:
            try:
                await self._read(wire)
            except Exception as error:  # noqa: BLE001 - without the ear nobody is woken any more
                log.warning(
                    "coordination.connection_lost", error=str(error) or type(error).__name__
                )
            finally:
                self._wire = None
                self._give_up_asking()
                await wire.disconnect(nowait=True)
            self._missed(False)
            wire = await self._connected_again()
            log.info("coordination.connection_restored")
            self._missed(True)

    async def _connected_again(self) -> Wire:
        pause = FIRST_PAUSE
        while True:
            await asyncio.sleep(pause)
            try:
                return await self._connected()
            except FAILURES as error:
                log.debug("coordination.connection_refused", error=str(error))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _connected(self) -> Wire:
        """A connection that hears all channels."""
        wire = self._commands.wire()
        channels = set(self._wanted)
        try:
            async with asyncio.timeout(self._commands.patience):
                await wire.connect()
                await wire.send_command("SUBSCRIBE", *channels, check_health=False)
                confirmed = 0
                while confirmed < len(channels):
                    message = await wire.read_response()
                    confirmed += message[0] == "subscribe"
                    self._heard(message)
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
            message = await wire.read_response(timeout=self._quiet, disconnect_on_error=False)
            if message is not None:
                pinged = False
                self._heard(message)
            elif pinged:
                raise ConnectionError("no answer to a ping")
            else:
                pinged = True
                await wire.send_command("PING", check_health=False)

    def _heard(self, message: list[Any]) -> None:
        match message:
            case ["message", channel, content]:
                self._hear(channel, content)
            case ["subscribe", channel, _] if asked := self._asked.get(channel):
                confirmed = asked.popleft()
                if not asked:
                    del self._asked[channel]
                if not confirmed.done():
                    confirmed.set_result(True)

    def _give_up_asking(self) -> None:
        for asked in self._asked.values():
            for confirmed in asked:
                if not confirmed.done():
                    confirmed.set_result(False)
        self._asked.clear()


async def _send(wire: Wire, *command: str) -> None:
    # By now it may be closed. redis-py would connect it again, and nobody would read from it.
    if not wire.is_connected:
        raise ConnectionError("the connection is lost")
    await wire.send_command(*command, check_health=False)
