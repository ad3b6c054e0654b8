"""Routes of templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import PlainTextResponse, Response

from atoll import ids
from atoll.api.rest import sse
from atoll.api.rest.parameters import Cursor
from atoll.api.rest.responses import JsonResponse, page_of
from atoll.api.rest.schemas.templates import (
    CreateTemplate,
    TemplateIn,
    TemplateOut,
    TemplatePage,
    template_out,
)
from atoll.api.rest.services import services_of
from atoll.errors import Conflict
from atoll.model.template import Template

if TYPE_CHECKING:
    from atoll.api.rest.services import Services
    from atoll.drivers.base import RegistryAuth

router = APIRouter(prefix="/templates", tags=["templates"])


def _template_of(services: Services, template_id: str, body: TemplateIn) -> Template:
    return body.template(template_id, services.templates.base_resources, services.clock.now())


def _credentials(body: TemplateIn) -> RegistryAuth | None:
    return None if body.registry is None else body.registry.credentials()


@router.post("", status_code=201, responses={201: {"model": TemplateOut}})
async def create_template(request: Request, body: CreateTemplate) -> JsonResponse:
    """
    Create a template. Security requirements that the node cannot meet are refused, not weakened. A
    template with packages, a Dockerfile or an image that must be pulled is built first; its
    `status` shows the progress.
    """
    services = services_of(request)
    seed = request.scope.get("atoll.seed")
    wanted = _template_of(services, body.id or ids.template_id(seed), body)
    try:
        template = await services.templates.create(wanted, credentials=_credentials(body))
    except Conflict:
        if body.id is not None or seed is None:
            raise
        # Its id follows from the Idempotency-Key: an earlier try of this request created it.
        template = await services.templates.get(wanted.id)
    return JsonResponse(template_out(template), 201)


@router.get("", responses={200: {"model": TemplatePage}})
async def list_templates(
    request: Request, cursor: Cursor = None, limit: Annotated[int, Query(ge=1, le=500)] = 50
) -> JsonResponse:
    """List templates, newest first."""
    page = await services_of(request).templates.list(cursor=cursor, limit=limit)
    return page_of([template_out(template) for template in page.items], page.next_cursor)


@router.get("/{template_id}", responses={200: {"model": TemplateOut}})
async def get_template(request: Request, template_id: str) -> JsonResponse:
    """Get the newest version of a template."""
    template = await services_of(request).templates.get(template_id)
    return JsonResponse(template_out(template))


@router.put("/{template_id}", responses={200: {"model": TemplateOut}})
async def replace_template(request: Request, template_id: str, body: TemplateIn) -> JsonResponse:
    """Replace all fields, as a new version. Existing sessions keep the version they have."""
    services = services_of(request)
    wanted = _template_of(services, template_id, body)
    template = await services.templates.replace(wanted, credentials=_credentials(body))
    return JsonResponse(template_out(template))


@router.get("/{template_id}/versions", responses={200: {"model": TemplatePage}})
async def list_versions(
    request: Request,
    template_id: str,
    cursor: Cursor = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
) -> JsonResponse:
    """List the versions of a template, newest first."""
    found, following = await services_of(request).templates.versions(
        template_id, cursor=cursor, limit=limit
    )
    return page_of([template_out(template) for template in found], following)


@router.get("/{template_id}/versions/{number}", responses={200: {"model": TemplateOut}})
async def get_version(
    request: Request, template_id: str, number: Annotated[int, Path(ge=1, le=2**31 - 1)]
) -> JsonResponse:
    """Get one version of a template."""
    return JsonResponse(
        template_out(await services_of(request).templates.numbered(template_id, number))
    )


_LOG: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}, sse.MEDIA_TYPE: {}}}}


@router.get("/{template_id}/log", response_class=PlainTextResponse, responses=_LOG)
async def get_log(
    request: Request,
    template_id: str,
    version: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
    follow: bool = False,
) -> Response:
    """
    Get the end of the build log of the newest or of another version. With `follow`, as server-sent
    events `log` and `status` until the build has ended.
    """
    builds = services_of(request).builds
    text = await builds.log(template_id, version)
    if follow:
        reservation = services_of(request).streams.open(request.scope)
        return sse.event_stream(builds.follow(template_id, version), reservation)
    headers = {"X-Content-Type-Options": "nosniff"}
    return Response(text, media_type="text/plain; charset=utf-8", headers=headers)


@router.post("/{template_id}/build", status_code=202, responses={202: {"model": TemplateOut}})
async def build_template(request: Request, template_id: str) -> JsonResponse:
    """Build the template again as a new version, with current packages and images."""
    template = await services_of(request).templates.build(template_id)
    return JsonResponse(template_out(template), 202)


@router.delete("/{template_id}", status_code=204)
async def delete_template(request: Request, template_id: str) -> Response:
    """Delete a template. It must not be used by any running session."""
    await services_of(request).templates.remove(template_id)
    return Response(status_code=204)
