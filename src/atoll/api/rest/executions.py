"""Routes of executions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Body, Header, Query, Request
from starlette.responses import StreamingResponse

from atoll.api.rest import execute_route, sse
from atoll.api.rest.middleware.client_limits import key_of
from atoll.api.rest.public_urls import absolute_url_or_none
from atoll.api.rest.responses import JsonResponse, page_of, with_age
from atoll.api.rest.schemas.executions import (
    ArtifactPage,
    Cancel,
    ExecutionOut,
    ExecutionPage,
    Inject,
    ResultOut,
    Resume,
    StatusOut,
    Submitted,
    artifact_out,
    execution_out,
    result_out,
    status_out,
)
from atoll.api.rest.services import key_id_of, services_of
from atoll.errors import AtollError, Conflict, InvalidRequest
from atoll.model.execution import ExecutionStatus
from atoll.service.executions.offload import size_of

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
    Run something. Answers at once with the execution's id; with `wait`, with the result itself if
    it comes in that many seconds.
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
    cursor: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> JsonResponse:
    """A session's executions, newest first."""
    return await _page(request, session_id, None, status, cursor, limit)


@router.get("/executions", responses={200: {"model": ExecutionPage}})
async def list_all_executions(
    request: Request,
    session_id: str | None = None,
    invocation_id: str | None = None,
    status: ExecutionStatus | None = None,
    cursor: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> JsonResponse:
    """Executions of all sessions, or of one, or of an invocation, newest first."""
    if session_id is not None and invocation_id is not None:
        raise InvalidRequest("Give session_id or invocation_id, not both.", field="invocation_id")
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
    # Megabytes of output may be in it: beside the loop, not on it.
    return await asyncio.to_thread(
        lambda: page_of([execution_out(item) for item in page.items], page.next_cursor)
    )


@router.get("/executions/{execution_id}", responses={200: {"model": ExecutionOut}})
async def get_execution(request: Request, execution_id: str) -> JsonResponse:
    found = services_of(request).executions
    execution, age = await found.look(execution_id)
    approval = None if age is not None else await found.question(execution)
    return with_age(execution_out(execution, approval, linker(request, execution.session_id)), age)


@router.get("/executions/{execution_id}/artifacts", responses={200: {"model": ArtifactPage}})
async def list_artifacts(request: Request, execution_id: str) -> JsonResponse:
    """The files that an execution made or changed, all on one page."""
    execution, _ = await services_of(request).executions.look(execution_id)
    link = linker(request, execution.session_id)
    found = () if execution.outcome is None else execution.outcome.artifacts
    items = [{**artifact_out(item, link), "execution_id": execution.id} for item in found]
    return page_of(items, None)


@router.get("/sessions/{session_id}/artifacts", responses={200: {"model": ArtifactPage}})
async def list_session_artifacts(
    request: Request,
    session_id: str,
    cursor: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> JsonResponse:
    """
    The files that a session's executions made or changed, by path, each with its newest version.
    They may have been removed since.
    """
    page = await services_of(request).artifacts.page(session_id, cursor=cursor, limit=limit)
    link = linker(request, session_id)
    items = [
        {**artifact_out(item.artifact, link), "execution_id": item.execution_id}
        for item in page.items
    ]
    return page_of(items, page.next_cursor)


def linker(request: Request, session_id: str) -> Callable[[str], str] | None:
    """What makes links to files; None where the server does not know its address."""
    signed_urls = services_of(request).signed_urls
    base = absolute_url_or_none(request, "/")
    if base is None:
        return None
    key_id = key_id_of(request)
    return lambda path: base.rstrip("/") + signed_urls.artifact(session_id, path, key_id=key_id)


@router.get("/executions/{execution_id}/status", responses={200: {"model": StatusOut}})
async def get_status(request: Request, execution_id: str) -> JsonResponse:
    execution, age = await services_of(request).executions.look(execution_id)
    return with_age(status_out(execution), age)


@router.get("/executions/{execution_id}/result", responses={200: {"model": ResultOut}})
async def get_result(
    request: Request, execution_id: str, wait: Annotated[float, Query(ge=0)] = 0.0
) -> JsonResponse:
    """
    The result, waited for as long as `wait` says; 409 `execution_not_finished` when there is none.
    """
    execution, age = await services_of(request).executions.look(execution_id, wait=wait)
    if execution.outcome is None:
        raise Conflict(
            f"Execution {execution_id} has not ended.",
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
    End an execution: SIGTERM to all of it, SIGKILL after a grace of two seconds. 409
    `execution_ended` when it has ended by itself.
    """
    reason = None if body is None else body.reason
    return JsonResponse(
        status_out(await services_of(request).executions.cancel(execution_id, reason))
    )


@router.post("/executions/{execution_id}/inject", responses={200: {"model": StatusOut}})
async def inject(request: Request, execution_id: str, body: Inject) -> JsonResponse:
    """
    Tell running code something: a message that it reads when it likes, or more for its stdin. 409
    `execution_not_running` before it has started and when it has ended.
    """
    found = services_of(request).executions
    if body.message is not None:
        await found.inject(execution_id, body.message)
    else:
        await found.type(execution_id, body.data, eof=body.eof)
    execution = await found.get(execution_id)
    return JsonResponse(status_out(execution))


@router.post("/executions/{execution_id}/resume", responses={200: {"model": StatusOut}})
async def resume(request: Request, execution_id: str, body: Resume) -> JsonResponse:
    """Answer the question that running code asks; 409 `no_approval` when it asks nothing."""
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
) -> StreamingResponse:
    """
    What happens, as server-sent events: `queued`, `started`, `stdout`, `stderr`, `display`,
    `approval`, `heartbeat`, `retry`, and `result` at the end. Whoever sends the last id it heard as
    `Last-Event-ID` is told exactly the rest.
    """
    found = services_of(request)
    execution = await found.executions.get(execution_id)
    held = [found.streams.open(request.scope)]
    if execution.outcome is not None:
        # What is replayed stays in memory while the client reads.
        size = size_of(execution.outcome)
        try:
            held.append(found.response_memory.reserve(key_of(request.scope), size))
        except AtollError:
            held[0].close()
            raise
    return sse.answer(found.executions.events(execution_id, last_event_id or 0), *held)
