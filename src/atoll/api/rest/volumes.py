"""Routes of volumes."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from atoll.api.rest.parameters import Cursor
from atoll.api.rest.responses import JsonResponse, page_of
from atoll.api.rest.schemas.volumes import CreateVolume, VolumeOut, VolumePage, volume_out
from atoll.api.rest.services import services_of
from atoll.model.resources import parse_size

router = APIRouter(prefix="/volumes", tags=["volumes"])


@router.post("", status_code=201, responses={201: {"model": VolumeOut}})
async def create_volume(request: Request, body: CreateVolume) -> JsonResponse:
    """Create an empty volume. Sessions mount it by its id."""
    size = None if body.size is None else parse_size(body.size, "size")
    volume = await services_of(request).volumes.create(body.id, size=size, kind=body.kind)
    return JsonResponse(volume_out(volume), 201)


@router.get("", responses={200: {"model": VolumePage}})
async def list_volumes(
    request: Request, cursor: Cursor = None, limit: Annotated[int, Query(ge=1, le=500)] = 50
) -> JsonResponse:
    """List volumes, newest first."""
    page = await services_of(request).volumes.list(cursor=cursor, limit=limit)
    return page_of([volume_out(volume) for volume in page.items], page.next_cursor)


@router.get("/{volume_id}", responses={200: {"model": VolumeOut}})
async def get_volume(request: Request, volume_id: str) -> JsonResponse:
    """Get a volume."""
    volume = await services_of(request).volumes.get(volume_id)
    return JsonResponse(volume_out(volume))


@router.delete("/{volume_id}", status_code=204)
async def delete_volume(request: Request, volume_id: str) -> Response:
    """Delete a volume and its contents. It must not be mounted by any session."""
    await services_of(request).volumes.remove(volume_id)
    return Response(status_code=204)
