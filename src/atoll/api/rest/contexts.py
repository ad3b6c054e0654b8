"""Routes of a session's contexts."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Request
from starlette.responses import Response

from atoll import ids
from atoll.api.rest.responses import JsonResponse, page_of
from atoll.api.rest.schemas.contexts import ContextOut, ContextPage, CreateContext, context_out
from atoll.api.rest.services import services_of

router = APIRouter(prefix="/sessions/{session_id}/contexts", tags=["contexts"])


@router.post("", status_code=201, responses={201: {"model": ContextOut}})
async def create_context(
    request: Request, session_id: str, body: Annotated[CreateContext | None, Body()] = None
) -> JsonResponse:
    """
    Create a context: an interpreter that keeps variables, imports and open files from one execution
    with its `context_id` to the next. It is ready when the response arrives.
    """
    body = body or CreateContext()
    seed = request.scope.get("atoll.seed")
    context = await services_of(request).contexts.create(
        session_id,
        language=body.language,
        cwd=body.cwd,
        context_id=None if seed is None else ids.context_id(seed),
    )
    return JsonResponse(context_out(context), 201)


@router.get("", responses={200: {"model": ContextPage}})
async def list_contexts(request: Request, session_id: str) -> JsonResponse:
    """List the contexts of a session, oldest first."""
    found = await services_of(request).contexts.list(session_id)
    return page_of([context_out(context) for context in found], None)


@router.get("/{context_id}", responses={200: {"model": ContextOut}})
async def get_context(request: Request, session_id: str, context_id: str) -> JsonResponse:
    """Get a context."""
    return JsonResponse(
        context_out(await services_of(request).contexts.get(session_id, context_id))
    )


@router.post("/{context_id}/restart", responses={200: {"model": ContextOut}})
async def restart_context(request: Request, session_id: str, context_id: str) -> JsonResponse:
    """Restart a context under the same id, without its state. A running execution is cancelled."""
    return JsonResponse(
        context_out(await services_of(request).contexts.restart(session_id, context_id))
    )


@router.post("/{context_id}/interrupt", responses={200: {"model": ContextOut}})
async def interrupt_context(request: Request, session_id: str, context_id: str) -> JsonResponse:
    """
    Interrupt the execution that runs in a context with SIGINT (KeyboardInterrupt in Python). The
    context keeps its state. An idle context is not affected.
    """
    return JsonResponse(
        context_out(await services_of(request).contexts.interrupt(session_id, context_id))
    )


@router.delete("/{context_id}", status_code=204)
async def delete_context(request: Request, session_id: str, context_id: str) -> Response:
    """Delete a context and cancel the execution that runs in it."""
    await services_of(request).contexts.delete(session_id, context_id)
    return Response(status_code=204)
