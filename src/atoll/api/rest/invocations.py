"""Routes of invocations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Body, Query, Request
from starlette.responses import Response, StreamingResponse

from atoll import ids
from atoll.api.rest import sse
from atoll.api.rest.middleware.backpressure import may_be_large, offer_short_response
from atoll.api.rest.parameters import Cursor
from atoll.api.rest.responses import JsonResponse, page_of
from atoll.api.rest.schemas.execution_requests import Cancel
from atoll.api.rest.schemas.executions import ExecutionPage, execution_out
from atoll.api.rest.schemas.invocations import InvocationOut, InvocationPage, Invoke, invocation_out
from atoll.api.rest.services import services_of
from atoll.model.execution import Mode
from atoll.model.invocation import InvocationStatus
from atoll.model.stream_event import StreamEvent
from atoll.service.executions.offload import size_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Scope

    from atoll.api.rest.middleware.client_limits import Reservation
    from atoll.api.rest.services import Services
    from atoll.service.executions.run import Run

router = APIRouter(prefix="/invocations", tags=["invocations"])


@router.post(
    "",
    status_code=202,
    response_class=Response,
    responses={
        200: {
            "model": InvocationOut,
            "description": "The ended invocation (sync), or its events (stream).",
            "content": {sse.MEDIA_TYPE: {}},
        },
        202: {"model": InvocationOut},
    },
)
async def invoke(request: Request, body: Invoke) -> Response:
    """
    Run a function, code or a command. Mode `sync` returns the result, or 202 if it takes longer
    than a request may wait; `async` returns at once; `stream` returns the events as they happen;
    `console` runs it on a terminal that clients can attach to, or on pipes with `stdin_open` and
    without `terminal`.
    """
    services = services_of(request)
    limits = services.settings.execution
    # The person at the console ends it.
    timeout = limits.max_timeout if body.mode is Mode.CONSOLE else limits.timeout
    # Before anything runs: later it could not be refused.
    reservation = services.streams.open(request.scope) if body.mode is Mode.STREAM else None
    try:
        running = await services.invocations.submit(
            body.session_id,
            body.request(timeout.total_seconds()),
            invocation_id=body.invocation_id,
            execution_id=body.execution_id or _seeded(request, body),
        )
    except BaseException:
        if reservation is not None:
            reservation.close()
        raise
    if reservation is not None:
        return _stream(services, running, reservation)
    if body.mode is Mode.SYNC:
        most = services.settings.execution.max_wait.total_seconds()
        await services.executions.await_end(
            running, most if body.wait_ms is None else body.wait_ms / 1000
        )
    return await _respond(services, running, request.scope)


def _seeded(request: Request, body: Invoke) -> str | None:
    """
    The execution id that follows from the request's Idempotency-Key. An invocation with an id of
    its own is repeated by that id, and another execution id would be a conflict.
    """
    seed: ids.Seed | None = request.scope.get("atoll.seed")
    return None if seed is None or body.invocation_id else ids.execution_id(seed.at, seed)


async def _respond(services: Services, running: Run, scope: Scope) -> JsonResponse:
    execution = running.execution
    invocation = await services.invocations.of(execution)
    if execution.outcome is not None and may_be_large(size_of(execution.outcome)):
        offer_short_response(scope, invocation_out(invocation), 202)
    return JsonResponse(
        invocation_out(invocation, execution), 202 if execution.outcome is None else 200
    )


def _stream(services: Services, running: Run, reservation: Reservation) -> StreamingResponse:
    execution = running.execution

    async def events() -> AsyncIterator[StreamEvent]:
        accepted = {
            "invocation_id": execution.invocation_id,
            "execution_id": execution.id,
            "session_id": execution.session_id,
        }
        yield StreamEvent(None, "accepted", accepted)
        async for event in services.executions.events(execution.id, 0):
            yield event

    return sse.event_stream(events(), reservation)


@router.get("", responses={200: {"model": InvocationPage}})
async def list_invocations(
    request: Request,
    session_id: str | None = None,
    status: InvocationStatus | None = None,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> JsonResponse:
    """
    List invocations by their latest execution, newest first, without results. One that has just
    started to run may be listed as `accepted`. A page with fewer than `limit` items is the last
    only if `next_cursor` is null.
    """
    services = services_of(request)
    if session_id is not None:
        await services.sessions.get(session_id)
    page = await services.invocations.list(
        session_id=session_id, status=status, cursor=cursor, limit=limit
    )
    return page_of([invocation_out(item) for item in page.items], page.next_cursor)


@router.get("/{invocation_id}", responses={200: {"model": InvocationOut}})
async def get_invocation(request: Request, invocation_id: str) -> JsonResponse:
    """Get an invocation, with its result if it has ended."""
    services = services_of(request)
    invocation = await services.invocations.get(invocation_id)
    execution = None
    if invocation.status.ended:
        execution = await services.executions.get(invocation.execution_id)
    return JsonResponse(invocation_out(invocation, execution))


@router.get("/{invocation_id}/executions", responses={200: {"model": ExecutionPage}})
async def list_executions_of(
    request: Request,
    invocation_id: str,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> JsonResponse:
    """List the executions of an invocation, newest first."""
    services = services_of(request)
    await services.invocations.get(invocation_id)
    page = await services.executions.list(invocation_id=invocation_id, cursor=cursor, limit=limit)
    return page_of([execution_out(item) for item in page.items], page.next_cursor)


@router.post("/{invocation_id}/cancel", responses={200: {"model": InvocationOut}})
async def cancel_invocation(
    request: Request, invocation_id: str, body: Annotated[Cancel | None, Body()] = None
) -> JsonResponse:
    """Cancel an invocation. 409 `invocation_ended` if it has already ended."""
    reason = None if body is None else body.reason
    return JsonResponse(
        invocation_out(await services_of(request).invocations.cancel(invocation_id, reason))
    )
