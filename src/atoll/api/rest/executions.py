"""Routes of executions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Body, Header, Query, Request
from starlette.responses import Response, StreamingResponse

from atoll.api.rest import direct_routes, execute_route
from atoll.api.rest.parameters import Cursor
from atoll.api.rest.public_urls import absolute_url_or_none
from atoll.api.rest.responses import JsonResponse, page_of, with_age
from atoll.api.rest.schemas.execution_requests import Cancel, Inject, Resume
from atoll.api.rest.schemas.executions import (
    ArtifactPage,
    ExecutionOut,
    ExecutionPage,
    ResultOut,
    StatusOut,
    Submitted,
    artifact_out,
    execution_out,
    result_out,
    status_out,
)
from atoll.api.rest.services import key_id_of, services_of
from atoll.errors import Conflict, InvalidRequest
from atoll.model.execution import ExecutionStatus

router = APIRouter(tags=["executions"])

_EXECUTE_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Execute"}}},
    }
}


@router.post(
    "/sessions/{session_id}/execute",
    status_code=202,
    responses={200: {"model": ResultOut}, 202: {"model": Submitted}},
    openapi_extra=_EXECUTE_BODY,
)
async def execute(request: Request, session_id: str) -> JsonResponse:
    """
    Run code or a command in a session. Returns the id of the execution at once (202); with `wait`,
    the result if it is ready within that many seconds (200).
    """
    status, answer = await execute_route.execute(
        services_of(request), session_id, await request.body(), request.scope
    )
    return JsonResponse(answer, status)


@router.get("/sessions/{session_id}/executions", responses={200: {"model": ExecutionPage}})
async def list_executions(
    request: Request,
    session_id: str,
    status: ExecutionStatus | None = None,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> JsonResponse:
    """List the executions of a session, newest first."""
    return await _page(request, session_id, None, status, cursor, limit)


@router.get("/executions", responses={200: {"model": ExecutionPage}})
async def list_all_executions(
    request: Request,
    session_id: str | None = None,
    invocation_id: str | None = None,
    status: ExecutionStatus | None = None,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> JsonResponse:
    """List executions, of all sessions, of one session or of one invocation, newest first."""
    if session_id is not None and invocation_id is not None:
        raise InvalidRequest(
            "Give either session_id or invocation_id, not both.", field="invocation_id"
        )
    return await _page(request, session_id, invocation_id, status, cursor, limit)


async def _page(
    request: Request,
    session_id: str | None,
    invocation_id: str | None,
    status: ExecutionStatus | None,
    cursor: str | None,
    limit: int,
) -> JsonResponse:
    page = await services_of(request).executions.list(
        session_id=session_id,
        invocation_id=invocation_id,
        status=status,
        cursor=cursor,
        limit=limit,
    )
    # Encoding megabytes of output would block the event loop.
    return await asyncio.to_thread(
        lambda: page_of([execution_out(item) for item in page.items], page.next_cursor)
    )


@router.get("/executions/{execution_id}", responses={200: {"model": ExecutionOut}})
async def get_execution(request: Request, execution_id: str) -> JsonResponse:
    """Get an execution with its request, its attempts and, if it has ended, its outcome."""
    found = services_of(request).executions
    execution, age = await found.get_or_recall(execution_id)
    approval = None if age is not None else await found.question(execution)
    return with_age(execution_out(execution, approval, linker(request, execution.session_id)), age)


@router.get("/executions/{execution_id}/artifacts", responses={200: {"model": ArtifactPage}})
async def list_artifacts(request: Request, execution_id: str) -> JsonResponse:
    """List the files that an execution created or changed, all on one page."""
    execution, _ = await services_of(request).executions.get_or_recall(execution_id)
    link = linker(request, execution.session_id)
    found = () if execution.outcome is None else execution.outcome.artifacts
    items = [{**artifact_out(item, link), "execution_id": execution.id} for item in found]
    return page_of(items, None)


@router.get("/sessions/{session_id}/artifacts", responses={200: {"model": ArtifactPage}})
async def list_session_artifacts(
    request: Request,
    session_id: str,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> JsonResponse:
    """
    List the files that executions of a session created or changed, ordered by path, each in its
    newest version. They may have been deleted since.
    """
    page = await services_of(request).artifacts.page(session_id, cursor=cursor, limit=limit)
    link = linker(request, session_id)
    items = [
        {**artifact_out(item.artifact, link), "execution_id": item.execution_id}
        for item in page.items
    ]
    return page_of(items, page.next_cursor)


def linker(request: Request, session_id: str) -> Callable[[str], str] | None:
    """Makes download links; None if the server does not know its public address."""
    signed_urls = services_of(request).signed_urls
    base = absolute_url_or_none(request, "/")
    if base is None:
        return None
    key_id = key_id_of(request)
    return lambda path: base.rstrip("/") + signed_urls.artifact(session_id, path, key_id=key_id)


@router.get("/executions/{execution_id}/status", responses={200: {"model": StatusOut}})
async def get_status(request: Request, execution_id: str) -> JsonResponse:
    """Get the status of an execution, without its output."""
    execution, age = await services_of(request).executions.get_or_recall(execution_id)
    return with_age(status_out(execution), age)


@router.get("/executions/{execution_id}/result", responses={200: {"model": ResultOut}})
async def get_result(
    request: Request, execution_id: str, wait: Annotated[float, Query(ge=0)] = 0.0
) -> JsonResponse:
    """
    Get the result of an execution, waiting up to `wait` seconds for it. 409
    `execution_not_finished` if there is none yet.
    """
    execution, age = await services_of(request).executions.get_or_recall(execution_id, wait=wait)
    if execution.outcome is None:
        raise Conflict(
            f"Execution {execution_id} has not finished. Retry, or wait longer with `wait`.",
            code="execution_not_finished",
            status_now=execution.status.value,
            **({} if age is None else {"stale": True}),
        )
    return with_age(result_out(execution, execution.outcome), age)


@router.post("/executions/{execution_id}/cancel", responses={200: {"model": StatusOut}})
async def cancel_execution(
    request: Request, execution_id: str, body: Annotated[Cancel | None, Body()] = None
) -> JsonResponse:
    """
    Cancel an execution: its processes get SIGTERM, and SIGKILL two seconds later. 409
    `execution_ended` if it has already ended.
    """
    reason = None if body is None else body.reason
    return JsonResponse(
        status_out(await services_of(request).executions.cancel(execution_id, reason))
    )


@router.post("/executions/{execution_id}/inject", responses={200: {"model": StatusOut}})
async def inject(request: Request, execution_id: str, body: Inject) -> JsonResponse:
    """
    Send a message or more stdin to running code. 409 `execution_not_running` before it has started
    and after it has ended.
    """
    found = services_of(request).executions
    if body.message is not None:
        await found.inject(execution_id, body.message)
    else:
        await found.write_stdin(execution_id, body.data, eof=body.eof)
    execution = await found.get(execution_id)
    return JsonResponse(status_out(execution))


@router.post("/executions/{execution_id}/resume", responses={200: {"model": StatusOut}})
async def resume(request: Request, execution_id: str, body: Resume) -> JsonResponse:
    """Answer the question that running code waits for. 409 `no_approval` if there is none."""
    answer = {"approved": body.approved, "answer": body.answer, "reason": body.reason}
    found = services_of(request).executions
    return JsonResponse(
        status_out(await found.resume(execution_id, answer, approval=body.approval_id))
    )


@router.get(
    "/executions/{execution_id}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def get_events(
    request: Request,
    execution_id: str,
    last_event_id: Annotated[int | None, Header(ge=0)] = None,
) -> Response:
    """
    Follow an execution as server-sent events: `queued`, `started`, `stdout`, `stderr`, `display`,
    `approval`, `heartbeat`, `retry`, and finally `result`. Send the id of the last event that you
    received as `Last-Event-ID` to get exactly the events after it.
    """
    return await direct_routes.execution_events(
        services_of(request), execution_id, request.scope, last_event_id or 0
    )
