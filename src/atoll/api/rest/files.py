"""Routes of a session's files. Bodies are streamed in both directions."""

from __future__ import annotations

import mimetypes
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from atoll.api.rest.answers import timestamp
from atoll.api.rest.context import Answer, page_answer, services
from atoll.api.rest.multipart import parts
from atoll.api.rest.requests import Mkdir, Move
from atoll.api.rest.schemas import EntryOut, EntryPage, Uploaded
from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.service.files import Entry


class Anything(PathConvertor):
    """A path with whatever a file name may hold: the framework's own ends at a line's end."""

    regex = "(?s:.*)"


register_url_convertor("anything", Anything())
router = APIRouter(prefix="/sessions/{session_id}/files", tags=["files"])


def _body_of(*kinds: str) -> dict[str, Any]:
    """A raw body, for the description of the API: the routes read it as a stream."""
    schema = {"schema": {"type": "string", "format": "binary"}}
    return {"requestBody": {"required": True, "content": dict.fromkeys(kinds, schema)}}


def _entry_out(entry: Entry) -> dict[str, Any]:
    return {
        "path": entry.path,
        "name": entry.name,
        "type": entry.type,
        "size": entry.size,
        "mode": f"{entry.mode:04o}",
        "modified_at": timestamp(entry.modified_at),
    }


@router.get("", responses={200: {"model": EntryPage}})
async def list_files(
    request: Request,
    session_id: str,
    path: str = "",
    cursor: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Answer:
    """The entries of a directory, by name."""
    page = await services(request).files.list(session_id, path, cursor=cursor, limit=limit)
    return page_answer([_entry_out(entry) for entry in page.items], page.next_cursor)


@router.post(
    "/upload",
    status_code=201,
    responses={201: {"model": Uploaded}},
    openapi_extra=_body_of("multipart/form-data", "application/octet-stream"),
)
async def upload(request: Request, session_id: str, path: str = "") -> Answer:
    """
    Upload files: as multipart/form-data, each part with a file name, into the directory `path`; or
    one file as the raw body, under the name `path`.
    """
    files = services(request).files
    kind = request.headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        if not path:
            raise InvalidRequest("path: a raw upload needs the name of the file.", field="path")
        entry = await files.write(session_id, path, _body(request))
        return Answer({"items": [_entry_out(entry)]}, 201)
    written = []
    async for part in parts(kind, _body(request)):
        if part.filename is None:
            if part.name == "path":
                path = (await part.text()).strip("/")
            continue
        name = part.filename.rpartition("/")[2]
        if name in ("", "."):
            raise InvalidRequest("A part has no file name.", code="bad_path")
        target = f"{path.rstrip('/')}/{name}" if path else name
        written.append(_entry_out(await files.write(session_id, target, part.content())))
    if not written:
        raise InvalidRequest("The form has no part with a file name.", code="no_file")
    return Answer({"items": written}, 201)


async def _body(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect:
        raise InvalidRequest("The upload was broken off.", code="upload_aborted") from None


@router.post("/mkdir", status_code=201, responses={201: {"model": EntryOut}})
async def make_directory(request: Request, session_id: str, body: Mkdir) -> Answer:
    entry = await services(request).files.mkdir(session_id, body.path, parents=body.parents)
    return Answer(_entry_out(entry), 201)


@router.post("/move", responses={200: {"model": EntryOut}})
async def move_file(request: Request, session_id: str, body: Move) -> Answer:
    entry = await services(request).files.move(
        session_id, body.source, body.target, overwrite=body.overwrite
    )
    return Answer(_entry_out(entry))


@router.put(
    "/{path:anything}",
    status_code=201,
    responses={201: {"model": EntryOut}},
    openapi_extra=_body_of("application/octet-stream"),
)
async def put_file(request: Request, session_id: str, path: str) -> Answer:
    """Write a file from the raw body: whole, or not at all. Directories above it are made."""
    entry = await services(request).files.write(session_id, path, _body(request))
    return Answer(_entry_out(entry), 201)


@router.get(
    "/{path:anything}",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
async def get_file(
    request: Request, session_id: str, path: str, metadata: bool = False
) -> Response:
    """Download a file; with `metadata=true`, what it is (an `EntryOut`) instead."""
    files = services(request).files
    if metadata:
        return Answer(_entry_out(await files.stat(session_id, path)))
    entry, content = await files.read(session_id, path)
    name = quote(entry.name, errors="replace")
    return StreamingResponse(
        content,
        media_type=mimetypes.guess_type(entry.name)[0] or "application/octet-stream",
        headers={
            "Content-Length": str(entry.size),
            # What user code wrote must not run as a page of this origin.
            "Content-Disposition": f"attachment; filename*=UTF-8''{name}",
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": "sandbox",
        },
    )


@router.delete("/{path:anything}", status_code=204)
async def delete_file(
    request: Request, session_id: str, path: str, recursive: bool = False
) -> Response:
    await services(request).files.remove(session_id, path, recursive=recursive)
    return Response(status_code=204)
