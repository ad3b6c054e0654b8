"""
Requests that run something in a session, and what happens if their caller leaves.

An execution is cancelled when the call that waits for it is cancelled or fails. A request without
an idempotency key gets an execution id, so that it can be sent again without running twice.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from atoll import ids
from atoll.sdk.arguments import check_number
from atoll.sdk.callbacks import Callbacks, follow
from atoll.sdk.decode import decode
from atoll.sdk.executions import AsyncExecution
from atoll.sdk.invocations import AsyncInvocation
from atoll.sdk.retry import best_effort, undo_if_cancelled
from atoll.sdk.values import InvocationInfo, Result

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from atoll.sdk.http_client import HttpClient

# The request that submits a short execution also returns its result. It must not wait much longer:
# the execution cannot be cancelled before the response has told its id.
_SUBMIT_WAIT = 1.0
CALLER_LEFT = "The caller stopped waiting."
"""Reason of a cancellation that the caller did not ask for."""


class ExecutionRequests:
    """Runs code and functions in one session."""

    def __init__(self, http: HttpClient, session_path: str) -> None:
        self._http = http
        self._path = f"{session_path}/execute"

    async def run(
        self,
        body: dict[str, Any],
        key: str | None,
        callbacks: Callbacks,
        wait: float | None = None,
    ) -> Result:
        if callbacks:
            execution = await self.submit(body, key)
            return await _or_cancel(execution, follow(execution, callbacks))
        first = _SUBMIT_WAIT if wait is None else min(_SUBMIT_WAIT, wait)
        sending = self._send(self._path, body, key, first)
        answer = await undo_if_cancelled(sending, self._cancel)
        if answer["status"] != "submitted":
            return decode(Result, answer)
        execution = AsyncExecution(self._http, answer["execution_id"])
        return await _or_cancel(execution, execution.wait())

    async def submit(self, body: dict[str, Any], key: str | None) -> AsyncExecution:
        answer = await undo_if_cancelled(self._send(self._path, body, key), self._cancel)
        return AsyncExecution(self._http, answer["execution_id"])

    async def invoke(self, body: dict[str, Any], key: str | None, mode: str) -> AsyncInvocation:
        async def undo(answer: Any) -> None:
            info = decode(InvocationInfo, answer)
            await AsyncInvocation(self._http, info).cancel(CALLER_LEFT)

        answer = await undo_if_cancelled(self._send("invocations", body, key), undo)
        invocation = AsyncInvocation(self._http, decode(InvocationInfo, answer))
        if mode == "sync":
            await _or_cancel(invocation, invocation.wait())
        return invocation

    async def _send(
        self, path: str, body: dict[str, Any], key: str | None, wait: float = 0.0
    ) -> Any:
        # An id costs the server nothing, unlike a key.
        if key is None and "execution_id" not in body and "invocation_id" not in body:
            body = {**body, "execution_id": ids.execution_id(datetime.now(UTC))}
        # In a header: a key stands for the body, and calls with different waits may share it.
        headers = {"prefer": f"wait={wait:g}"} if wait else {}
        return await self._http.call_once(path, key=key, body=body, headers=headers, wait=wait)

    async def _cancel(self, answer: Any) -> None:
        if answer["status"] == "submitted":
            await AsyncExecution(self._http, answer["execution_id"]).cancel(CALLER_LEFT)


async def _or_cancel(
    work: AsyncExecution | AsyncInvocation, waiting: Coroutine[None, None, Result]
) -> Result:
    try:
        return await waiting
    except BaseException:
        # The caller was cancelled, a callback failed, or the server is lost.
        await best_effort(work.cancel(CALLER_LEFT))
        raise


@asynccontextmanager
async def time_limit(wait: float | None) -> AsyncIterator[None]:
    """Cancel the block after `wait` seconds."""
    check_number(wait=wait)
    limit = asyncio.timeout(wait)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(
            f"The execution did not end within {wait:g} s and was cancelled."
        ) from None
