"""
Responses that are files, ranges of files, or archives.

Files that user code wrote must not run as pages of this origin: they are sent as attachments,
browsers may not guess their type, and must sandbox them if they show them nevertheless.
"""

from __future__ import annotations

import mimetypes
from typing import TYPE_CHECKING
from urllib.parse import quote

import structlog
from starlette.responses import Response, StreamingResponse

from atoll.api.rest import conditional_requests
from atoll.api.rest.problems import precondition_failed, range_not_satisfiable
from atoll.errors import AtollError
from atoll.service.files.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.types import Send

    from atoll.service.files.service import Files
    from atoll.service.files.types import Download, FileInfo

log = structlog.get_logger(__name__)

MEDIA_TYPES = {"tar": "application/x-tar", "tar.gz": "application/gzip", "zip": "application/zip"}
_SAFE = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "sandbox; default-src 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


async def file_response(
    request: Request, files: Files, session_id: str, path: str, *, filename: str | None = None
) -> Response:
    """The response to GET or HEAD."""
    headers = request.headers
    requested = conditional_requests.requested_range(headers)
    if request.method == "HEAD" or conditional_requests.needs_file_info(headers):
        found = await files.read(session_id, path, requested, head=True)
        status = conditional_requests.evaluate(headers, found.entry)
        if status == 304:
            return Response(status_code=304, headers=_headers(found.entry, filename))
        if status == 412:
            return precondition_failed()
        requested = conditional_requests.requested_range(headers, found.entry)
        if request.method == "HEAD":
            if requested is None or requested.if_range not in (None, found.entry.etag):
                found = await files.read(session_id, path, None, head=True)
            return _response(found, requested, filename, body=False)
    found = await files.read(session_id, path, requested)
    return _response(found, requested, filename, body=True)


def _response(
    found: Download, requested: ByteRange | None, filename: str | None, *, body: bool
) -> Response:
    entry = found.entry
    if found.start is None:
        return range_not_satisfiable(entry.size)
    headers = _headers(entry, filename)
    headers["Content-Length"] = str(found.stop - found.start)
    # `If-Range` did not match: the complete file.
    is_complete = requested is None or requested.if_range not in (None, entry.etag)
    if not is_complete:
        headers["Content-Range"] = f"bytes {found.start}-{found.stop - 1}/{entry.size}"
    status, kind = 200 if is_complete else 206, media_type(entry)
    if not body:
        return Response(status_code=status, headers=headers, media_type=kind)
    return StreamedFile(found.content, status, headers, kind)


def media_type(entry: FileInfo) -> str:
    return mimetypes.guess_type(entry.name)[0] or "application/octet-stream"


def _headers(entry: FileInfo, filename: str | None) -> dict[str, str]:
    headers = {
        **_SAFE,
        "Accept-Ranges": "bytes",
        "Last-Modified": conditional_requests.last_modified(entry),
        "Cache-Control": "private, no-cache",
        "Content-Disposition": _attachment(filename or entry.name),
    }
    tag = conditional_requests.etag(entry)
    if tag is not None:
        headers["ETag"] = tag
    return headers


def _attachment(name: str) -> str:
    # Never a path, and no invisible characters that disguise the name.
    safe = "".join("_" if char in "/\\" or not char.isprintable() else char for char in name)
    return f"attachment; filename*=UTF-8''{quote(safe if safe.strip('.') else 'file', safe='')}"


def archive_response(content: AsyncIterator[bytes], name: str, form: str) -> Response:
    headers = {
        **_SAFE,
        "Cache-Control": "no-store",
        "Content-Disposition": _attachment(f"{name}.{form}"),
    }
    return StreamedFile(content, 200, headers, MEDIA_TYPES[form])


class StreamedFile(StreamingResponse):
    """
    Closes the connection if its content fails halfway, because that is the only way to report an
    error after the response has started.
    """

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except AtollError as error:
            log.info("download.aborted", code=error.code, error=error.message)
