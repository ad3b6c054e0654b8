"""Routes of templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from atoll import ids
from atoll.api.rest.answers import template_out
from atoll.api.rest.context import Answer, page_answer, services
from atoll.api.rest.requests import CreateTemplate, TemplateIn
from atoll.api.rest.schemas import TemplateOut, TemplatePage
from atoll.errors import Conflict
from atoll.model.template import Template

if TYPE_CHECKING:
    from atoll.api.rest.context import Services

router = APIRouter(prefix="/templates", tags=["templates"])


def _template(template_id: str, body: TemplateIn, found: Services) -> Template:
    now = found.clock.now()
    return Template(
        id=template_id,
        name=body.name,
        created_at=now,
        updated_at=now,
        default_resources=body.default_resources.over(found.templates.base_resources),
        image=body.image,
        base_image=body.base_image,
        pre_installed_packages=tuple(body.pre_installed_packages),
        require=tuple(body.security_context.require),
        python=body.python,
        preload=tuple(body.preload),
        env=body.env,
        pool_size=body.pool_size,
    )


@router.post("", status_code=201, responses={201: {"model": TemplateOut}})
async def create_template(request: Request, body: CreateTemplate) -> Answer:
    """Create a template. What it demands and this node cannot give is refused, not weakened."""
    found = services(request)
    seed = request.scope.get("atoll.seed")
    wanted = _template(body.id or ids.template_id(seed), body, found)
    try:
        template = await found.templates.create(wanted)
    except Conflict:
        if body.id is not None or seed is None:
            raise
        # Its id comes from this very request, which was begun before and not answered.
        template = await found.templates.get(wanted.id)
    return Answer(template_out(template), 201)


@router.get("", responses={200: {"model": TemplatePage}})
async def list_templates(
    request: Request, cursor: str | None = None, limit: Annotated[int, Query(ge=1, le=500)] = 50
) -> Answer:
    page = await services(request).templates.list(cursor=cursor, limit=limit)
    return page_answer([template_out(template) for template in page.items], page.next_cursor)


@router.get("/{template_id}", responses={200: {"model": TemplateOut}})
async def get_template(request: Request, template_id: str) -> Answer:
    return Answer(template_out(await services(request).templates.get(template_id)))


@router.put("/{template_id}", responses={200: {"model": TemplateOut}})
async def replace_template(request: Request, template_id: str, body: TemplateIn) -> Answer:
    """All fields anew. Sessions that run keep what they started with."""
    found = services(request)
    return Answer(template_out(await found.templates.replace(_template(template_id, body, found))))


@router.delete("/{template_id}", status_code=204)
async def delete_template(request: Request, template_id: str) -> Response:
    """Remove a template that no running session uses."""
    await services(request).templates.remove(template_id)
    return Response(status_code=204)
