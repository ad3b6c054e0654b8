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
    """Get the packages that a session requested, those installed, and the state of installation."""
    install = await services_of(request).dependencies.get(session_id)
    return JsonResponse(install_out(install))


@router.get("/log", response_class=PlainTextResponse)
async def get_log(request: Request, session_id: str) -> PlainTextResponse:
    """
    Get the output of the last installation, also while it runs: at most 256 KiB, its beginning and
    its end.
    """
    output = await services_of(request).dependencies.log(session_id)
    return PlainTextResponse(output.decode("utf-8", "replace"))


@router.post("", responses={200: {"model": InstallOut}})
async def add_dependencies(
    request: Request, session_id: str, body: AddDependencies
) -> JsonResponse:
    """
    Install packages in a running session, for executions that start after the response. If the
    installation fails, the session keeps the packages that it has.
    """
    services = services_of(request)
    install = await services.dependencies.add(
        session_id,
        tuple(item.dependency() for item in body.dependencies),
        timeout=body.install_timeout,
        allow_conflicts=body.allow_version_conflicts,
    )
    return JsonResponse(install_out(install))
