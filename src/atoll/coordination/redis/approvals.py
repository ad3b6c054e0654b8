"""
Questions to people, and their answers, in Redis.

The record of a question names the replica that asks and its deadline, so that an answer to a lost
replica can be refused. It is stored before the asking task first waits and read whenever the task
is woken, so an answer that comes in between is found. An answered question stays until it expires.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from atoll.coordination.base import CANCELLED, SHUTDOWN
from atoll.coordination.payload import decode, encode
from atoll.coordination.redis import scripts
from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.coordination.base import Resolution
    from atoll.coordination.redis.commands import Commands
    from atoll.coordination.redis.waiters import Waiters
    from atoll.settings import CoordinationSettings

KEPT_AFTER_TIMEOUT = 60.0
"""Seconds that an approval outlives its time-out."""


class RedisApprovals:
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
        self._check_interval = settings.presence_ttl.total_seconds() / 3
        self._commands = commands
        self._waiters = waiters
        self._alive = alive
        self._asked: dict[str, str] = {}
        """Executions by the tokens of their open questions."""

    async def ask(
        self, execution_id: str, question: dict[str, Any], timeout: float
    ) -> dict[str, Any] | None:
        text = encode(question)
        with self._waiters.add() as (token, wake_up):
            self._asked[token] = execution_id
            deadline = asyncio.get_running_loop().time() + timeout
            try:
                answer = await self._put(execution_id, text, token, timeout)
                while answer is None:
                    if self._waiters.shut_down:
                        return dict(SHUTDOWN)
                    left = deadline - asyncio.get_running_loop().time()
                    if left <= 0:
                        answer = await self._withdraw(execution_id, token)
                        break
                    await wake_up.wait(min(left, self._check_interval))
                    current, answer = await self._commands.send(
                        "HMGET", self._keys(execution_id)[0], "token", "answer"
                    )
                    if current != token:  # Forgotten, or replaced by another question.
                        return None
                return None if answer is None else decode(answer)
            except asyncio.CancelledError:
                await self._forget(execution_id, token)
                raise
            except TemporaryError:
                if self._waiters.shut_down:
                    return dict(SHUTDOWN)
                raise
            finally:
                del self._asked[token]

    async def _put(
        self, execution_id: str, question: str, token: str, timeout: float
    ) -> str | None:
        answer: str | None = await self._commands.run(
            scripts.ASK,
            self._keys(execution_id),
            self._prefix,
            question,
            self._replica,
            token,
            int(timeout * 1000),
            int((timeout + KEPT_AFTER_TIMEOUT) * 1000),
            encode(CANCELLED),
            encode(SHUTDOWN),
        )
        return answer

    async def _withdraw(self, execution_id: str, token: str) -> str | None:
        """The answer if there is one; otherwise withdraw the question."""
        answer: str | None = await self._commands.run(
            scripts.WITHDRAW, self._keys(execution_id)[:1], self._prefix, token
        )
        return answer

    async def _forget(self, execution_id: str, token: str) -> None:
        try:
            await self._withdraw(execution_id, token)
        except TemporaryError:
            return  # It expires.

    async def question(self, execution_id: str) -> dict[str, Any] | None:
        pending = await self._commands.run(
            scripts.QUESTION, self._keys(execution_id)[:1], self._prefix
        )
        if pending is None or await self._is_lost(pending[1]):
            return None
        return decode(pending[0])

    async def resolve(
        self, execution_id: str, answer: dict[str, Any], question: dict[str, Any] | None
    ) -> Resolution:
        text = encode(answer)
        asker = await self._commands.send("HGET", self._keys(execution_id)[0], "replica")
        if asker is None or await self._is_lost(asker):
            return "gone"
        asked = "" if question is None else encode(question)
        return await self._resolve(execution_id, text, question=asked)

    async def _resolve(
        self, execution_id: str, answer: str, token: str = "", question: str = ""
    ) -> Resolution:
        resolution: Resolution = await self._commands.run(
            scripts.RESOLVE, self._keys(execution_id)[:1], self._prefix, answer, token, question
        )
        return resolution

    async def _is_lost(self, replica: str) -> bool:
        return replica != self._replica and not await self._alive(replica)

    async def cancel(self, execution_id: str, reason: str, ttl: int) -> None:
        keys = self._keys(execution_id)
        answer = encode(CANCELLED)
        await self._commands.run(
            scripts.CANCEL, keys, self._prefix, execution_id, reason, ttl, answer
        )

    async def cancelled(self, execution_id: str) -> str | None:
        reason: str | None = await self._commands.send("GET", self._keys(execution_id)[1])
        return reason

    async def shut_down(self) -> None:
        """Answer all questions of this replica with `SHUTDOWN`, ignoring failures."""
        answer = encode(SHUTDOWN)
        resolved = [self._resolve(asker, answer, token) for token, asker in self._asked.items()]
        await asyncio.gather(*resolved, return_exceptions=True)

    def _keys(self, execution_id: str) -> tuple[str, str]:
        tag = f"{{{self._prefix}:{execution_id}}}"
        return f"{tag}:approval", f"{tag}:cancel"
