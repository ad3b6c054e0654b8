"""Routes of a session's Python packages."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse

from atoll.api.rest.responses import JsonResponse
from atoll.api.rest.schemas.packages import AddDependencies, InstallOut, install_out
from atoll.api.rest.services import services_of

router = APIRouter(prefix="/sessions/{session_id}/dependencies", tags=["dependencies"])


@router.get("", responses={200: {"model": InstallOut}})
async def get_dependencies(request: Request, session_id: str) -> JsonResponse:
    """What the session asked for and what it got, or how far that is."""
    install = await services_of(request).dependencies.get(session_id)
    return JsonResponse(install_out(install))


@router.get("/log", response_class=PlainTextResponse)
async def get_log(request: Request, session_id: str) -> PlainTextResponse:
    """
    What the session's last installation printed, while it goes on too: at most 256 KiB, its
    beginning and its end.
    """
    said = await services_of(request).dependencies.log(session_id)
    return PlainTextResponse(said.decode("utf-8", "replace"))


@router.post("", responses={200: {"model": InstallOut}})
async def add_dependencies(
    request: Request, session_id: str, body: AddDependencies
) -> JsonResponse:
    """
    Add packages to a session that runs; executions that begin after the answer find them. When that
    fails the session keeps what it has.
    """
    found = services_of(request)
    install = await found.dependencies.add(
        session_id,
        tuple(item.dependency() for item in body.dependencies),
        timeout=body.install_timeout,
        allow_conflicts=body.allow_version_conflicts,
    )
    return JsonResponse(install_out(install))
