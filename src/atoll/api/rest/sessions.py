"""Routes of sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Query, Request
from starlette.responses import Response

from atoll import ids
from atoll.api.rest import direct_routes
from atoll.api.rest.parameters import Cursor
from atoll.api.rest.responses import JsonResponse, page_of, with_age
from atoll.api.rest.schemas.sessions import (
    CreateSession,
    ProcessPage,
    SessionOut,
    SessionPage,
    UpdateSession,
    session_out,
)
from atoll.api.rest.services import services_of
from atoll.model.session import SessionStatus

router = APIRouter(prefix="/sessions", tags=["sessions"])

Wait = Annotated[
    float,
    Query(
        ge=0,
        description="Seconds to wait for the new status. Afterwards the session is returned in "
        "whatever status it has.",
    ),
]


@router.post("", status_code=201, responses={201: {"model": SessionOut}})
async def create_session(
    request: Request,
    body: Annotated[CreateSession | None, Body()] = None,
    wait: Annotated[
        bool,
        Query(
            description="With `false`, the response does not wait until Python packages are "
            "installed: the session is `creating`."
        ),
    ] = True,
) -> Response:
    """
    Create a session, from the warm pool if it has a ready instance. The session is running when the
    response arrives.
    """
    return await direct_routes.create_session(
        services_of(request), body or CreateSession(), request.scope, wait=wait
    )


@router.get("", responses={200: {"model": SessionPage}})
async def list_sessions(
    request: Request,
    status: SessionStatus | None = None,
    template_id: str | None = None,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> JsonResponse:
    """List sessions, newest first, including ended ones."""
    page = await services_of(request).sessions.list(
        status=status, template_id=template_id, cursor=cursor, limit=limit
    )
    return page_of([session_out(session) for session in page.items], page.next_cursor)


@router.get("/{session_id}", responses={200: {"model": SessionOut}})
async def get_session(request: Request, session_id: str) -> JsonResponse:
    """Get a session. Ended sessions can be read until their record is deleted."""
    session, age = await services_of(request).sessions.get_or_recall(session_id)
    return with_age(session_out(session), age)


@router.delete("/{session_id}", responses={200: {"model": SessionOut}})
async def delete_session(request: Request, session_id: str) -> Response:
    """End a session: its status becomes `terminated`. An ended session is not changed."""
    return await direct_routes.delete_session(services_of(request), session_id)


@router.patch("/{session_id}", responses={200: {"model": SessionOut}})
async def update_session(request: Request, session_id: str, body: UpdateSession) -> JsonResponse:
    """
    Change limits, time-outs, environment variables or labels. New limits apply at once, new
    variables to executions that start afterwards.
    """
    return JsonResponse(
        session_out(await services_of(request).sessions.update(session_id, body.change()))
    )


@router.post("/{session_id}/start", responses={200: {"model": SessionOut}})
async def start_session(request: Request, session_id: str, wait: Wait = 60) -> JsonResponse:
    """Start a stopped or archived session from its files, or resume a paused one."""
    return JsonResponse(
        session_out(await services_of(request).sessions.start(session_id, wait=wait))
    )


@router.post("/{session_id}/stop", responses={200: {"model": SessionOut}})
async def stop_session(request: Request, session_id: str, wait: Wait = 60) -> JsonResponse:
    """
    Stop a session: its instance and everything that runs in it ends, its files stay on its node.
    The next request that needs the session starts it again, unless `auto_start` is false.
    """
    return JsonResponse(
        session_out(await services_of(request).sessions.stop(session_id, wait=wait))
    )


@router.post("/{session_id}/archive", responses={200: {"model": SessionOut}})
async def archive_session(request: Request, session_id: str, wait: Wait = 60) -> JsonResponse:
    """Stop a session and move its files to the blob store, from which any node can start it."""
    return JsonResponse(
        session_out(await services_of(request).sessions.archive(session_id, wait=wait))
    )


@router.post("/{session_id}/pause", responses={200: {"model": SessionOut}})
async def pause_session(request: Request, session_id: str, wait: Wait = 60) -> JsonResponse:
    """
    Pause a session: it uses no CPU time and keeps its memory, contexts and processes. Refused with
    409 `session_busy` while an execution runs. The next request resumes it.
    """
    return JsonResponse(
        session_out(await services_of(request).sessions.pause(session_id, wait=wait))
    )


@router.post("/{session_id}/resume", responses={200: {"model": SessionOut}})
async def resume_session(request: Request, session_id: str, wait: Wait = 60) -> JsonResponse:
    """Same as `start`."""
    return JsonResponse(
        session_out(await services_of(request).sessions.start(session_id, wait=wait))
    )


@router.post("/{session_id}/clone", status_code=201, responses={201: {"model": SessionOut}})
async def clone_session(
    request: Request, session_id: str, body: Annotated[UpdateSession | None, Body()] = None
) -> JsonResponse:
    """
    Create a session with the same settings, except for those in the body, and a copy of the files.
    Memory, processes and executions are not copied.
    """
    seed = request.scope.get("atoll.seed")
    session = await services_of(request).sessions.clone(
        session_id,
        (body or UpdateSession()).change(),
        session_id=None if seed is None else ids.session_id(seed),
    )
    return JsonResponse(session_out(session), 201)


@router.get("/{session_id}/processes", responses={200: {"model": ProcessPage}})
async def list_processes(request: Request, session_id: str) -> JsonResponse:
    """List processes that executions of the session left running in the background."""
    found = await services_of(request).sessions.processes(session_id)
    return page_of(list(found), None)


@router.delete("/{session_id}/processes", responses={200: {"model": ProcessPage}})
async def end_processes(request: Request, session_id: str) -> JsonResponse:
    """End these processes and everything that they started. Returns the ended processes."""
    found = await services_of(request).sessions.processes(session_id, end=True)
    return page_of(list(found), None)
