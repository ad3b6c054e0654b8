"""Routes of executions."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from starlette.responses import StreamingResponse

from atoll.api.rest import hot
from atoll.api.rest.answers import (
    ExecutionOut,
    ExecutionPage,
    ResultOut,
    StatusOut,
    Submitted,
    execution_out,
    result_out,
    status_out,
)
from atoll.api.rest.context import Answer, page_answer, services, shown
from atoll.errors import Conflict
from atoll.model.execution import ExecutionStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.model.execution import Execution

router = APIRouter(tags=["executions"])

PING_SECONDS = 15.0
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
async def execute(request: Request, session_id: str) -> Answer:
    """
    Run something. Answers at once with the execution's id; with `wait`, with the result itself if
    it comes in that many seconds.
    """
    status, answer = await hot.execute(
        services(request), session_id, await request.body(), request.scope.get("atoll.seed")
    )
    return Answer(answer, status)


@router.get("/sessions/{session_id}/executions", responses={200: {"model": ExecutionPage}})
async def list_executions(
    request: Request,
    session_id: str,
    status: ExecutionStatus | None = None,
    cursor: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 50,
) -> Answer:
    """A session's executions, newest first."""
    page = await services(request).executions.list(
        session_id=session_id, status=status, cursor=cursor, limit=limit
    )
    # Megabytes of output may be in it: beside the loop, not on it.
    return await asyncio.to_thread(
        lambda: page_answer([execution_out(item) for item in page.items], page.next_cursor)
    )


@router.get("/executions/{execution_id}", responses={200: {"model": ExecutionOut}})
async def get_execution(request: Request, execution_id: str) -> Answer:
    execution, age = await services(request).executions.look(execution_id)
    return shown(execution_out(execution), age)


@router.get("/executions/{execution_id}/status", responses={200: {"model": StatusOut}})
async def get_status(request: Request, execution_id: str) -> Answer:
    execution, age = await services(request).executions.look(execution_id)
    return shown(status_out(execution), age)


@router.get("/executions/{execution_id}/result", responses={200: {"model": ResultOut}})
async def get_result(
    request: Request, execution_id: str, wait: Annotated[float, Query(ge=0)] = 0.0
) -> Answer:
    """
    The result, waited for as long as `wait` says; 409 `execution_not_finished` when there is none.
    """
    execution, age = await services(request).executions.look(execution_id, wait=wait)
    if execution.outcome is None:
        raise Conflict(
            f"Execution {execution_id} has not ended.",
            code="execution_not_finished",
            status_now=execution.status.value,
            **({} if age is None else {"stale": True}),
        )
    return shown(result_out(execution, execution.outcome), age)


@router.post("/executions/{execution_id}/cancel", responses={200: {"model": StatusOut}})
async def cancel_execution(request: Request, execution_id: str) -> Answer:
    """
    End an execution: SIGTERM to all of it, SIGKILL two seconds later. One that has ended stays so.
    """
    return Answer(status_out(await services(request).executions.cancel(execution_id)))


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
    What happens, as server-sent events: `started`, `stdout`, `stderr`, and `result` at the end.
    """
    found = services(request).executions
    await found.get(execution_id)
    events = found.events(execution_id, last_event_id or 0)
    return StreamingResponse(_sse(events), media_type="text/event-stream", headers=_NO_CACHE)


_NO_CACHE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


async def _sse(events: AsyncIterator[tuple[int, str, Any]]) -> AsyncIterator[str]:
    """
    A comment after a while without an event, so that nobody in between takes the line for dead.
    """
    following = asyncio.ensure_future(anext(events))
    try:
        while True:
            done, _ = await asyncio.wait([following], timeout=PING_SECONDS)
            if not done:
                yield ": ping\n\n"
                continue
            try:
                number, name, content = following.result()
            except StopAsyncIteration:
                return
            yield f"id: {number}\nevent: {name}\ndata: {json.dumps(_content(name, content))}\n\n"
            following = asyncio.ensure_future(anext(events))
    finally:
        following.cancel()


def _content(name: str, content: bytes | Execution) -> dict[str, Any]:
    if not isinstance(content, bytes):
        assert content.outcome is not None
        return result_out(content, content.outcome)
    if name == "started":
        return {}
    try:
        return {"text": content.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}
