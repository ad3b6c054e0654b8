"""
Routes of signed links. They need no API key: the token in the URL grants one operation on one file.
The rest of the path belongs to the token, so that no redirect reveals it to another address.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from atoll.api.rest import downloads
from atoll.api.rest.responses import JsonResponse
from atoll.api.rest.schemas.files import EntryOut, entry_out
from atoll.api.rest.services import services_of
from atoll.api.rest.uploads import binary_body, upload_stream
from atoll.service.sessions.start import may_start

router = APIRouter(prefix="/signed", tags=["signed links"])

_OPEN: dict[str, Any] = {"security": []}


@router.head("/{token:anything}", include_in_schema=False)
@router.get(
    "/{token:anything}",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
    openapi_extra=_OPEN,
)
async def get_signed(request: Request, token: str) -> Response:
    """Download the file that the link grants, with ranges and conditions as with an API key."""
    services = services_of(request)
    grant = await services.signed_urls.verify(token, "GET")
    may_start.set(grant.may_start)
    return await downloads.file_response(
        request, services.files, grant.session_id, grant.path, filename=grant.filename
    )


@router.put(
    "/{token:anything}",
    status_code=201,
    responses={201: {"model": EntryOut}},
    openapi_extra={**_OPEN, **binary_body("application/octet-stream")},
)
async def put_signed(request: Request, token: str) -> JsonResponse:
    """Write the file that the link grants."""
    services = services_of(request)
    grant = await services.signed_urls.verify(token, "PUT")
    entry = await services.files.write(grant.session_id, grant.path, upload_stream(request))
    return JsonResponse(entry_out(entry), 201)


@router.post(
    "/{token:anything}", status_code=201, responses={201: {"model": EntryOut}}, openapi_extra=_OPEN
)
async def complete_signed(request: Request, token: str) -> JsonResponse:
    """Copy a file that was uploaded to the blob store through a native link into the workspace."""
    signed_urls = services_of(request).signed_urls
    _entry = await signed_urls.complete(await signed_urls.verify(token, "POST"))
    return JsonResponse(entry_out(_entry), 201)
