"""
Leases in Redis.

Taking a free lease costs one round trip, releasing it another. If the holder, or the first waiter,
is on another replica, the caller checks whether that replica is alive, and if not tries again
without it. A waiter keeps its place for `presence_ttl` and renews it three times as often.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING

from atoll.coordination.base import LeaseHolder
from atoll.coordination.redis import scripts
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.coordination.redis.commands import Commands
    from atoll.coordination.redis.waiters import Waiters
    from atoll.settings import CoordinationSettings

UNDO_BATCH = 100
"""Claims of unknown outcome that are undone at a time."""
MAX_UNCERTAIN = 10_000
"""Claims of unknown outcome that are remembered. Older ones have expired or never arrived."""


class RedisLeases:
    def __init__(
        self,
        replica: str,
        settings: CoordinationSettings,
        commands: Commands,
        waiters: Waiters,
        alive: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._replica = replica
        self._prefix = settings.prefix
        self._ttl = int(settings.lease_ttl.total_seconds() * 1000)
        self._place_ttl = int(settings.presence_ttl.total_seconds() * 1000)
        self._check_interval = settings.presence_ttl.total_seconds() / 3
        self._commands = commands
        self._waiters = waiters
        self._alive = alive
        self._held: dict[tuple[str, str], str] = {}
        """The claims that hold a lease, by key and owner."""
        self._uncertain: dict[str, str] = {}
        """Keys by claim, for claims whose outcome is unknown."""

    async def acquire(self, key: str, owner: str, wait: float) -> LeaseHolder | None:
        self._waiters.check()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait
        with self._waiters.add() as (token, wake_up):
            claim = f"{_encode_holder(self._replica, owner)}\n{token}"
            try:
                while True:
                    waits = loop.time() < deadline
                    holder, left = await self._try(key, claim, waits=waits)
                    self._waiters.check()
                    if holder is None:
                        self._held[key, owner] = claim
                        return None
                    self._held.pop((key, owner), None)
                    if not waits:
                        return holder
                    await wake_up.wait(min(deadline - loop.time(), self._check_interval, left))
                    self._waiters.check()
            except (TemporaryError, asyncio.CancelledError) as error:
                if (key, owner) not in self._held:
                    self._remember_uncertain(claim, key)
                    if self._waiters.shut_down or isinstance(error, asyncio.CancelledError):
                        await self._undo(claim)
                raise

    async def _try(self, key: str, claim: str, *, waits: bool) -> tuple[LeaseHolder | None, float]:
        """The claim ahead of this one, if any, and after how many seconds to check again."""
        lost = ""
        while True:
            answer = await self._commands.run(
                scripts.ACQUIRE,
                self._keys(key),
                self._prefix,
                claim,
                self._ttl,
                self._place_ttl if waits else 0,
                lost,
            )
            if answer is None:
                return None, 0.0
            ahead, left = answer
            holder = _decode_holder(ahead)
            if holder.replica == self._replica or await self._alive(holder.replica):
                # Redis expires a key in the millisecond after its last one.
                return holder, (left + 1) / 1000 if left >= 0 else math.inf
            lost = ahead

    async def renew(self, key: str, owner: str) -> bool:
        me = _encode_holder(self._replica, owner)
        renewed = await self._commands.run(
            scripts.RENEW, self._keys(key), self._prefix, me, self._ttl
        )
        if not renewed:
            self._held.pop((key, owner), None)
        return bool(renewed)

    async def release(self, key: str, owner: str, channel: str = "") -> None:
        claim = self._held.pop((key, owner), None)
        if claim is not None:
            self._remember_uncertain(claim, key)
        me = _encode_holder(self._replica, owner)
        await self._commands.run(scripts.RELEASE, self._keys(key), self._prefix, me, channel)
        if claim is not None:
            self._uncertain.pop(claim, None)

    def _remember_uncertain(self, claim: str, key: str) -> None:
        self._uncertain[claim] = key
        if len(self._uncertain) > MAX_UNCERTAIN:
            del self._uncertain[next(iter(self._uncertain))]

    async def undo_uncertain(self) -> None:
        """Undo claims whose answer did not arrive, until the server fails again."""
        for claim in list(self._uncertain)[:UNDO_BATCH]:
            if not await self._undo(claim):
                return

    async def _undo(self, claim: str) -> bool:
        if (key := self._uncertain.get(claim)) is None:
            return True
        try:
            await self._commands.run(scripts.LEAVE, self._keys(key), self._prefix, claim)
        except TemporaryError:
            return False
        self._uncertain.pop(claim, None)
        return True

    async def release_all(self) -> None:
        """Release all leases that this replica is known to hold, ignoring failures."""
        held = [self.release(key, owner) for key, owner in self._held]
        await asyncio.gather(*held, return_exceptions=True)
        await self.undo_uncertain()

    def _keys(self, key: str) -> tuple[str, str, str]:
        tag = f"{{{self._prefix}:{key}}}"
        return f"{tag}:lease", f"{tag}:line", f"{tag}:places"


def _encode_holder(replica: str, owner: str) -> str:
    return json.dumps([replica, owner])


def _decode_holder(claim: str) -> LeaseHolder:
    replica, owner = json.loads(claim.partition("\n")[0])
    return LeaseHolder(replica, owner)
