"""
Invocations: the request to run something, whose executions are where and when it ran.

The record follows the latest execution; while that runs, what is known of it here says more than
the record does.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from atoll.errors import Conflict, NotFound
from atoll.model.invocation import STATUS_OF, InvocationStatus

if TYPE_CHECKING:
    from atoll.model.execution import Request
    from atoll.model.invocation import Invocation, Mode
    from atoll.model.page import Page
    from atoll.service.executions import Executions
    from atoll.service.running import Running
    from atoll.stores.base import Store


class Invocations:
    def __init__(self, store: Store, executions: Executions) -> None:
        self._store = store
        self._executions = executions

    async def submit(
        self,
        session_id: str,
        request: Request,
        *,
        mode: Mode,
        metadata: dict[str, str],
        invocation_id: str | None,
        execution_id: str | None,
    ) -> Running:
        """
        Run something once: with the id of an invocation that exists, its execution. One that has
        failed is run again by naming a new execution.
        """
        known = None
        if invocation_id is not None:
            known = await self._store.invocations.get(invocation_id)
        if known is not None:
            if known.session_id != session_id:
                raise Conflict(
                    f"Invocation {known.id} is one of another session.",
                    code="invocation_id_in_use",
                )
            if execution_id is None:
                execution_id = known.execution_id
            if execution_id != known.execution_id:
                return await self._once_more(known, request, execution_id)
        try:
            return await self._executions.submit(
                session_id,
                request,
                execution_id=execution_id,
                invocation_id=invocation_id,
                mode=mode,
                metadata=metadata,
            )
        except Conflict:
            again = None
            if known is None and invocation_id is not None:
                again = await self._store.invocations.get(invocation_id)
            if again is None:
                raise
            # The same request, sent twice at once: the other was quicker.
            return await self.submit(
                session_id,
                request,
                mode=mode,
                metadata=metadata,
                invocation_id=invocation_id,
                execution_id=execution_id,
            )

    async def _once_more(self, known: Invocation, request: Request, execution_id: str) -> Running:
        """Another execution of an invocation; one that it had before is found again."""
        had = await self._store.executions.get(execution_id)
        if had is None and known.status is not InvocationStatus.FAILED:
            status = (await self._as_it_is(known)).status
            raise Conflict(
                f"Invocation {known.id} can be run again only when it has failed ({status}).",
                code="invocation_not_failed",
                status_now=status.value,
            )
        if had is not None and had.invocation_id != known.id:
            raise Conflict(
                f"Execution {execution_id} is one of another invocation.",
                code="execution_id_in_use",
            )
        return await self._executions.submit(
            known.session_id, request, execution_id=execution_id, instead_of=known
        )

    async def get(self, invocation_id: str) -> Invocation:
        invocation = await self._store.invocations.get(invocation_id)
        if invocation is None:
            raise NotFound(
                f"No invocation has the id {invocation_id}.", code="invocation_not_found"
            )
        return await self._as_it_is(invocation)

    async def list(
        self,
        *,
        session_id: str | None,
        status: InvocationStatus | None,
        cursor: str | None,
        limit: int,
    ) -> Page[Invocation]:
        return await self._store.invocations.page(
            session_id=session_id, status=status, cursor=cursor, limit=limit
        )

    async def cancel(self, invocation_id: str, reason: str | None) -> Invocation:
        """Cancel all that it is; `Conflict` when it has ended otherwise."""
        invocation = await self.get(invocation_id)
        if invocation.status is InvocationStatus.CANCELLED:
            return invocation
        if invocation.status.ended:
            raise Conflict(
                f"Invocation {invocation_id} has ended ({invocation.status}).",
                code="invocation_ended",
                status_now=invocation.status.value,
            )
        # Only its latest execution can be under way.
        await self._executions.cancel(invocation.execution_id, reason)
        return await self.get(invocation_id)

    async def _as_it_is(self, invocation: Invocation) -> Invocation:
        if invocation.status.ended:
            return invocation
        execution = await self._executions.get(invocation.execution_id)
        return dataclasses.replace(invocation, status=STATUS_OF[execution.status])
