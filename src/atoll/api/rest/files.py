"""
Routes of a session's files. Bodies are streamed in both directions.

A file may be called `search` or `watch` as well: `GET files/search` searches if it has `query`, and
`GET files/watch` watches if it has `path` or asks for an event stream; otherwise they download.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, Field
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.responses import Response, StreamingResponse

from atoll.api.rest import conditional_requests, downloads, sse
from atoll.api.rest.multipart import parts
from atoll.api.rest.parameters import Cursor
from atoll.api.rest.path_encoding import (
    path_in_query,
    path_in_url,
    percent_encoded,
    readable,
)
from atoll.api.rest.public_urls import absolute_url
from atoll.api.rest.responses import JsonResponse, page_of
from atoll.api.rest.schemas.base import timestamp
from atoll.api.rest.schemas.files import (
    Chmod,
    Copy,
    EntryOut,
    EntryPage,
    LinkOut,
    MatchPage,
    Mkdir,
    Move,
    Presign,
    Unpacked,
    Uploaded,
    entry_out,
    match_out,
)
from atoll.api.rest.schemas.types import path_of
from atoll.api.rest.services import key_id_of, services_of
from atoll.api.rest.uploads import binary_body, upload_stream
from atoll.errors import AtollError, InvalidRequest
from atoll.service.files.types import Search

Form = Literal["tar", "tar.gz", "zip"]
MAX_WRITTEN = 1000
"""Files that the problem document of a failed form lists."""


class AnyPath(PathConvertor):
    """A path with any characters; the framework's own converter stops at a line break."""

    regex = "(?s:.*)"


register_url_convertor("anything", AnyPath())
router = APIRouter(prefix="/sessions/{session_id}/files", tags=["files"])

_LIMIT = Query(ge=1, le=1000)
_MODE = Query(pattern=r"^0?[0-7]{3}$", description="Octal; 0644 if omitted.")
_GLOB = Query(
    min_length=1,
    max_length=1024,
    description="Pattern for paths relative to `path`: `*`, `?` and `[…]` match within a name, "
    "`**` matches directories.",
)
_EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}
_BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}


class SearchParameters(BaseModel):
    query: Annotated[str | None, Field(min_length=1, max_length=1000)] = None
    path: str = ""
    regex: bool = False
    ignore_case: bool = False
    glob: Annotated[str | None, _GLOB] = None
    cursor: Cursor = None
    limit: Annotated[int, _LIMIT] = 100


# Listing, searching and watching


@router.get("", responses={200: {"model": EntryPage}})
async def list_files(
    request: Request,
    session_id: str,
    path: str = "",
    recursive: bool = False,
    glob: Annotated[str | None, _GLOB] = None,
    cursor: Cursor = None,
    limit: Annotated[int, _LIMIT] = 100,
) -> JsonResponse:
    """
    List a directory, ordered by name; with `recursive` everything below it, with `glob` everything
    that matches. With either of them, a page may have fewer than `limit` items and a `next_cursor`.
    """
    files, path = services_of(request).files, path_in_query(request)
    if recursive or glob is not None:
        page = await files.tree(session_id, path, glob=glob, cursor=cursor, limit=limit)
    else:
        page = await files.list(session_id, path, cursor=cursor, limit=limit)
    return page_of([entry_out(entry) for entry in page.items], page.next_cursor)


@router.get("/search", response_model=None, responses={200: {"model": MatchPage}})
async def search_files(
    request: Request, session_id: str, search: Annotated[SearchParameters, Query()]
) -> Response:
    """
    Search text files for lines that contain `query`, or match it as a Python regular expression,
    and return the first match of each line. Files with a NUL near the beginning are skipped. A page
    takes at most 10 seconds. Without `query`, download the file named `search`.
    """
    if search.query is None:
        return await _download(request, session_id, "search")
    page = await services_of(request).files.search(
        session_id,
        path_in_query(request),
        Search(search.query, search.regex, search.ignore_case, search.glob),
        cursor=search.cursor,
        limit=search.limit,
    )
    return page_of([match_out(match) for match in page.items], page.next_cursor)


@router.get("/watch", response_class=StreamingResponse, responses=_EVENTS)
async def watch_files(
    request: Request, session_id: str, path: str | None = None, recursive: bool = True
) -> Response:
    """
    Watch the directory `path` ("" is the workspace) as server-sent events: `watching` first, then
    `created`, `modified`, `deleted` and `moved` with `path` and `encoded_path`, and `from` for
    moves; `overflow` if events were lost. Without `path` or `Accept: text/event-stream`, download
    the file named `watch`.
    """
    if path is None and sse.MEDIA_TYPE not in request.headers.get("accept", ""):
        return await _download(request, session_id, "watch")
    services = services_of(request)
    path = path_in_query(request)
    reservation = services.streams.open(request.scope)
    try:
        changes = await services.files.watch(session_id, path, recursive=recursive)
    except BaseException:
        reservation.close()
        raise
    return sse.encoded_stream(_events(changes), reservation)


async def _events(changes: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    yield "event: watching\ndata: {}\n\n"
    try:
        async for change in changes:
            path = change["path"]
            content = {"path": readable(path), "encoded_path": percent_encoded(path)}
            if (source := change.get("from")) is not None:
                content |= {"from": readable(source), "encoded_from": percent_encoded(source)}
            yield f"event: {change['type']}\ndata: {json.dumps(content)}\n\n"
    except AtollError as error:
        # The instance was lost. The client reconnects and compares the files.
        yield f"event: end\ndata: {json.dumps({'code': error.code})}\n\n"
        return
    yield 'event: end\ndata: {"code": "file_not_found"}\n\n'


# Uploading


@router.post(
    "/upload",
    status_code=201,
    responses={201: {"model": Uploaded}},
    openapi_extra=binary_body("multipart/form-data", "application/octet-stream"),
)
async def upload(request: Request, session_id: str, path: str = "") -> JsonResponse:
    """
    Upload files as multipart/form-data, each part with a file name, into the directory `path`; or
    one file as the raw body, as the file `path`. Each file is written completely or not at all. If
    a form fails, the files of earlier parts stay; the problem document lists them in `written`.
    """
    files, path = services_of(request).files, path_in_query(request)
    kind = request.headers.get("content-type", "")
    if not kind.startswith("multipart/form-data"):
        if not path:
            raise InvalidRequest("path: a raw upload needs the path of the file.", field="path")
        entry = await files.write(session_id, path, upload_stream(request))
        return JsonResponse({"items": [entry_out(entry)]}, 201)
    written: list[dict[str, Any]] = []
    try:
        async for part in parts(kind, upload_stream(request)):
            if part.filename is None:
                if part.name == "path":
                    path = (await part.text()).strip("/")
                continue
            name = part.filename.rpartition("/")[2]
            if name in ("", "."):
                raise InvalidRequest("A part of the form has no file name.", code="bad_path")
            target = f"{path.rstrip('/')}/{name}" if path else name
            written.append(entry_out(await files.write(session_id, target, part.content())))
    except AtollError as error:
        if written:
            error.details["written"] = [item["path"] for item in written[:MAX_WRITTEN]]
        raise
    if not written:
        raise InvalidRequest("The form has no part with a file name.", code="no_file")
    return JsonResponse({"items": written}, 201)


@router.put(
    "/{path:anything}",
    status_code=201,
    responses={201: {"model": EntryOut}, 200: {"model": Unpacked}},
    openapi_extra=binary_body("application/octet-stream"),
)
async def put_file(
    request: Request,
    session_id: str,
    path: str,
    mode: Annotated[str | None, _MODE] = None,
    archive: Form | None = None,
) -> JsonResponse:
    """
    Write a file from the raw body, completely or not at all. Missing parent directories are
    created. `If-Match` and `If-None-Match` guard against overwriting another version: 412
    `precondition_failed`.

    With `archive`, the body is an archive that is unpacked into the directory `path`, completely or
    not at all. A tar may be compressed with gzip. Directories are merged, files replace files.
    """
    return await _put(request, session_id, path_in_url(request), mode, archive)


async def _put(
    request: Request, session_id: str, path: str, mode: str | None, archive: str | None
) -> JsonResponse:
    files = services_of(request).files
    if archive is not None:
        count = await files.unpack(session_id, path, archive, upload_stream(request))
        return JsonResponse({"path": readable(path), "entries": count})
    entry = await files.write(
        session_id,
        path,
        upload_stream(request),
        mode=0o644 if mode is None else int(mode, 8),
        if_match=conditional_requests.parse_tags(request.headers.get("if-match")),
        if_none_match=conditional_requests.parse_tags(request.headers.get("if-none-match")),
    )
    tag = conditional_requests.etag(entry)
    return JsonResponse(entry_out(entry), 201, None if tag is None else {"ETag": tag})


# Changing


@router.post("/mkdir", status_code=201, responses={201: {"model": EntryOut}})
async def make_directory(request: Request, session_id: str, body: Mkdir) -> JsonResponse:
    """Create a directory."""
    entry = await services_of(request).files.mkdir(
        session_id, path_of(body.path), parents=body.parents
    )
    return JsonResponse(entry_out(entry), 201)


@router.post("/move", responses={200: {"model": EntryOut}})
async def move_file(request: Request, session_id: str, body: Move) -> JsonResponse:
    """Move or rename a file or directory."""
    entry = await services_of(request).files.move(
        session_id, path_of(body.source), path_of(body.target), overwrite=body.overwrite
    )
    return JsonResponse(entry_out(entry))


@router.post("/copy", status_code=201, responses={201: {"model": EntryOut}})
async def copy_file(request: Request, session_id: str, body: Copy) -> JsonResponse:
    """
    Copy a file or a directory with its contents, completely or not at all. Modes, times, links and
    holes are preserved; pipes, sockets and devices are skipped.
    """
    entry = await services_of(request).files.copy(
        session_id, path_of(body.source), path_of(body.target), overwrite=body.overwrite
    )
    return JsonResponse(entry_out(entry), 201)


@router.post("/chmod", responses={200: {"model": EntryOut}})
async def change_mode(request: Request, session_id: str, body: Chmod) -> JsonResponse:
    """Set the mode of a file or directory. Symbolic links have none."""
    entry = await services_of(request).files.chmod(
        session_id, path_of(body.path), int(body.mode, 8)
    )
    return JsonResponse(entry_out(entry))


@router.post("/presign", responses={200: {"model": LinkOut}})
async def presign(request: Request, session_id: str, body: Presign) -> JsonResponse:
    """
    Create a link that downloads or writes this one file without a key. It ends when it expires, or
    when the API key that created it is removed. Where blobs are on S3, a download's link is S3's
    own, returns the file as it is now, and is valid until it expires.
    """
    links, life = services_of(request).signed_urls, timedelta(seconds=body.expires_in)
    path, key_id = path_of(body.path), key_id_of(request)
    if body.method == "GET":
        link = await links.get(session_id, path, life, key_id=key_id, filename=body.filename)
    else:
        link = await links.put(session_id, path, life, key_id=key_id, direct=body.direct)
    return JsonResponse(
        {
            "url": absolute_url(request, link.url),
            "method": link.method,
            "expires_at": timestamp(link.expires_at),
            "native": link.native,
            "complete_url": None if link.complete is None else absolute_url(request, link.complete),
        }
    )


# Downloading


@router.head("/{path:anything}", include_in_schema=False)
@router.get("/{path:anything}", response_class=StreamingResponse, responses=_BYTES)
async def get_file(
    request: Request,
    session_id: str,
    path: str,
    metadata: bool = False,
    archive: Form | None = None,
) -> Response:
    """
    Download a file, or a part of it with `Range`. With `metadata=true`, get its size, mode, time
    and ETag (an `EntryOut`) instead; with `archive`, download a directory as an archive.
    Conditional requests and HEAD follow RFC 9110.
    """
    return await _download(request, session_id, path_in_url(request), metadata, archive)


async def _download(
    request: Request,
    session_id: str,
    path: str,
    metadata: bool = False,
    archive: str | None = None,
) -> Response:
    files = services_of(request).files
    if metadata:
        _entry = await files.stat(session_id, path)
        return JsonResponse(entry_out(_entry))
    if archive is not None:
        content = await files.pack(session_id, path, archive)
        name = path.rstrip("/").rpartition("/")[2] or "workspace"
        return downloads.archive_response(content, name, archive)
    return await downloads.file_response(request, files, session_id, path)


@router.delete("/{path:anything}", status_code=204)
async def delete_file(
    request: Request, session_id: str, path: str, recursive: bool = False
) -> Response:
    """Delete a file, or with `recursive` a directory and its contents."""
    path = path_in_url(request)
    await services_of(request).files.remove(session_id, path, recursive=recursive)
    return Response(status_code=204)
