"""
Leases in Redis.

A free lease costs one round trip to take and one to give back. One who is told a holder, or
somebody ahead in line, of another replica asks whether that replica is alive, and if not tries
again without it. A place in line lasts for `presence_ttl` and is renewed by looking, three times as
often.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING

from atoll.coordination.base import Holder
from atoll.coordination.redis import scripts
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.coordination.redis.commands import Commands
    from atoll.coordination.redis.waiting import Waiting
    from atoll.settings import CoordinationSettings

TAKEN_BACK = 100
"""Claims of unknown outcome that are taken back at a time."""
MOST_DOUBTFUL = 10_000
"""Such claims that are remembered. Older ones have expired, or were never heard."""


class Leases:
    def __init__(
        self,
        replica: str,
        settings: CoordinationSettings,
        commands: Commands,
        waiting: Waiting,
        alive: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._replica = replica
        self._prefix = settings.prefix
        self._ttl = int(settings.lease_ttl.total_seconds() * 1000)
        self._stay = int(settings.presence_ttl.total_seconds() * 1000)
        self._look = settings.presence_ttl.total_seconds() / 3
        self._commands = commands
        self._waiting = waiting
        self._alive = alive
        self._held: dict[tuple[str, str], str] = {}
        """The claims that got their lease, by key and owner."""
        self._doubtful: dict[str, str] = {}
        """The keys by claims of which it is not known what became of them."""

    async def acquire(self, key: str, owner: str, wait: float) -> Holder | None:
        self._waiting.check()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        with self._waiting.bell() as (token, bell):
            claim = f"{_spelled(self._replica, owner)}\n{token}"
            try:
                while True:
                    stand = loop.time() < deadline
                    holder, left = await self._try(key, claim, stand=stand)
                    self._waiting.check()
                    if holder is None:
                        self._held[key, owner] = claim
                        return None
                    self._held.pop((key, owner), None)
                    if not stand:
                        return holder
                    await bell.wait(min(deadline - loop.time(), self._look, left))
                    self._waiting.check()
            except (TemporaryError, asyncio.CancelledError) as error:
                if (key, owner) not in self._held:
                    self._doubt(claim, key)
                    if self._waiting.ended or isinstance(error, asyncio.CancelledError):
                        await self._undo(claim)
                raise

    async def _try(self, key: str, claim: str, *, stand: bool) -> tuple[Holder | None, float]:
        """Who is before the claim, if anybody, and in how many seconds to look at the latest."""
        lost = ""
        while True:
            told = await self._commands.run(
                scripts.ACQUIRE,
                self._keys(key),
                self._prefix,
                claim,
                self._ttl,
                self._stay if stand else 0,
                lost,
            )
            if told is None:
                return None, 0.0
            before, left = told
            holder = _holder(before)
            if holder.replica == self._replica or await self._alive(holder.replica):
                # Redis expires a key in the millisecond after its last.
                return holder, (left + 1) / 1000 if left >= 0 else math.inf
            lost = before

    async def renew(self, key: str, owner: str) -> bool:
        me = _spelled(self._replica, owner)
        renewed = await self._commands.run(
            scripts.RENEW, self._keys(key), self._prefix, me, self._ttl
        )
        if not renewed:
            self._held.pop((key, owner), None)
        return bool(renewed)

    async def release(self, key: str, owner: str) -> None:
        claim = self._held.pop((key, owner), None)
        if claim is not None:
            self._doubt(claim, key)
        me = _spelled(self._replica, owner)
        await self._commands.run(scripts.RELEASE, self._keys(key), self._prefix, me)
        if claim is not None:
            self._doubtful.pop(claim, None)

    async def holder(self, key: str) -> Holder | None:
        claim = await self._commands.send("GET", self._keys(key)[0])
        return None if claim is None else _holder(claim)

    async def clean(self, session_id: str, execution_id: str, window: str) -> None:
        self._held.pop((session_id, execution_id), None)
        keys = (*self._keys(session_id), window)
        await self._commands.run(scripts.CLEAN_SESSION, keys, self._prefix, execution_id)

    def _doubt(self, claim: str, key: str) -> None:
        self._doubtful[claim] = key
        if len(self._doubtful) > MOST_DOUBTFUL:
            del self._doubtful[next(iter(self._doubtful))]

    async def take_back(self) -> None:
        """Undo claims whose answer did not arrive, as far as the server can be reached."""
        for claim in list(self._doubtful)[:TAKEN_BACK]:
            if not await self._undo(claim):
                return

    async def _undo(self, claim: str) -> bool:
        if (key := self._doubtful.get(claim)) is None:
            return True
        try:
            await self._commands.run(scripts.LEAVE, self._keys(key), self._prefix, claim)
        except TemporaryError:
            return False
        self._doubtful.pop(claim, None)
        return True

    async def give_back(self) -> None:
        """Release all that this replica is known to hold, as far as the server can be reached."""
        held = [self.release(key, owner) for key, owner in self._held]
        await asyncio.gather(*held, return_exceptions=True)
        await self.take_back()

    def _keys(self, key: str) -> tuple[str, str, str]:
        tag = f"{{{self._prefix}:{key}}}"
        return f"{tag}:lease", f"{tag}:line", f"{tag}:places"


def _spelled(replica: str, owner: str) -> str:
    return json.dumps([replica, owner])


def _holder(claim: str) -> Holder:
    replica, owner = json.loads(claim.partition("\n")[0])
    return Holder(replica, owner)
