"""Routes of build contexts: the files that Dockerfiles of templates copy."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request

from atoll.api.rest.responses import JsonResponse
from atoll.api.rest.schemas.templates import BuildContextOut
from atoll.api.rest.services import services_of
from atoll.api.rest.uploads import upload_stream

PLACE = "/build-contexts"
router = APIRouter(prefix=PLACE, tags=["templates"])

Digest = Annotated[
    str, Path(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the tar in hexadecimal.")
]
_TAR = {
    "requestBody": {
        "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}},
        "required": True,
    }
}


@router.put(
    "/{digest}",
    status_code=201,
    responses={201: {"model": BuildContextOut}},
    openapi_extra=_TAR,
)
async def put_build_context(request: Request, digest: Digest) -> JsonResponse:
    """
    Upload an uncompressed tar with the files that a Dockerfile copies. A template refers to it as
    `build_context`; if no template does, it is deleted after a while.
    """
    size = await services_of(request).build_inputs.put(digest, upload_stream(request))
    return JsonResponse({"digest": digest, "size": size}, 201)


@router.get("/{digest}", responses={200: {"model": BuildContextOut}})
async def get_build_context(request: Request, digest: Digest) -> JsonResponse:
    """Check that a build context exists, and get its size."""
    return JsonResponse(
        {"digest": digest, "size": await services_of(request).build_inputs.size(digest)}
    )
