"""
The verbs of the API for invocations.

An invocation is computed from its executions: its state is that of the latest one. While that is in
flight here, this replica knows more than the record.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from atoll.errors import Conflict, NotFound
from atoll.model.invocation import (
    STATUS_OF,
    STATUSES_OF,
    Invocation,
    InvocationStatus,
    invocation_of,
)
from atoll.model.page import Page
from atoll.service.executions.submit import Overtaken

if TYPE_CHECKING:
    from atoll.model.execution import Execution, Request
    from atoll.service.executions.run import Run
    from atoll.service.executions.service import Executions
    from atoll.stores.base import Store


class Invocations:
    def __init__(self, store: Store, executions: Executions) -> None:
        self._store = store
        self._executions = executions
        self._submitting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Locks of the invocation ids that are being submitted."""

    async def submit(
        self,
        session_id: str,
        request: Request,
        *,
        invocation_id: str | None,
        execution_id: str | None,
    ) -> Run:
        """
        Run a request once: a repeated invocation id gets its execution. A failed invocation is run
        again by naming a new execution id.
        """
        if invocation_id is None:
            return await self._executions.submit(session_id, request, execution_id=execution_id)
        # In turn, as in `Submitter.submit`.
        lock = self._submitting.setdefault(invocation_id, asyncio.Lock())
        async with lock:
            latest = await self._latest(invocation_id)
            while True:
                try:
                    return await self._submit(
                        session_id, request, invocation_id, execution_id, latest
                    )
                except Overtaken:
                    # The same request at another replica was faster; use what it has made.
                    before, latest = latest, await self._latest(invocation_id)
                    if latest is None or latest == before:
                        raise

    async def _submit(
        self,
        session_id: str,
        request: Request,
        invocation_id: str,
        execution_id: str | None,
        latest: Execution | None,
    ) -> Run:
        """Submit to an invocation whose latest execution is `latest`."""
        if latest is not None:
            if latest.session_id != session_id:
                raise Conflict(
                    f"Invocation {invocation_id} belongs to another session.",
                    code="invocation_id_in_use",
                )
            if execution_id is None:
                return await self._executions.repeat(latest)
            if execution_id != latest.id:
                return await self._run_again(latest, request, execution_id)
        return await self._executions.submit(
            session_id, request, execution_id=execution_id, invocation_id=invocation_id
        )

    async def _run_again(self, latest: Execution, request: Request, execution_id: str) -> Run:
        """Another execution of an invocation, or one that it had before."""
        known = await self._store.executions.get(execution_id)
        if known is None and STATUS_OF[latest.status] is not InvocationStatus.FAILED:
            status = self._invocation(latest).status
            raise Conflict(
                f"Invocation {latest.invocation_id} is {status}. Only a failed invocation can be "
                "run again.",
                code="invocation_not_failed",
                status_now=status.value,
            )
        return await self._executions.submit(
            latest.session_id,
            # The metadata is that of the invocation.
            dataclasses.replace(request, metadata=latest.request.metadata),
            execution_id=execution_id,
            invocation_id=latest.invocation_id,
            after=latest,
        )

    async def get(self, invocation_id: str) -> Invocation:
        latest = await self._latest(invocation_id)
        if latest is None:
            raise NotFound(
                f"No invocation has the id {invocation_id}.", code="invocation_not_found"
            )
        return self._invocation(latest)

    async def of(self, execution: Execution) -> Invocation:
        """The invocation of an execution."""
        if execution.superseded:
            assert execution.invocation_id is not None
            return await self.get(execution.invocation_id)
        return self._invocation(execution)

    async def list(
        self,
        *,
        session_id: str | None,
        status: InvocationStatus | None,
        cursor: str | None,
        limit: int,
    ) -> Page[Invocation]:
        """A page of records. It may have fewer than `limit` items and not be the last."""
        page = await self._store.executions.latest(
            session_id=session_id,
            statuses=() if status is None else STATUSES_OF[status],
            cursor=cursor,
            limit=limit,
        )
        return Page(tuple(map(invocation_of, page.items)), page.next_cursor)

    async def cancel(self, invocation_id: str, reason: str | None) -> Invocation:
        """Cancel its executions; `Conflict` if it has ended otherwise."""
        invocation = await self.get(invocation_id)
        if invocation.status is InvocationStatus.CANCELLED:
            return invocation
        if invocation.status.ended:
            raise Conflict(
                f"Invocation {invocation_id} has ended ({invocation.status}).",
                code="invocation_ended",
                status_now=invocation.status.value,
            )
        # Only its latest execution can be in flight.
        await self._executions.cancel(invocation.execution_id, reason)
        return await self.get(invocation_id)

    async def _latest(self, invocation_id: str) -> Execution | None:
        page = await self._store.executions.page(invocation_id=invocation_id, limit=1)
        return page.items[0] if page.items else None

    def _invocation(self, latest: Execution) -> Invocation:
        return invocation_of(latest if latest.status.ended else self._executions.in_flight(latest))
