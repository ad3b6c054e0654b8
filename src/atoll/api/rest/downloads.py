"""
A file as an answer: whole or a range of it, with or without its content.

What user code wrote must not run as a page of this origin: it is sent as an attachment, is not
sniffed, and is sandboxed where a browser shows it nevertheless.
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


async def answer(
    request: Request, files: Files, session_id: str, path: str, *, filename: str | None = None
) -> Response:
    """GET or HEAD of a file."""
    headers = request.headers
    part = conditional_requests.part(headers)
    if request.method == "HEAD" or conditional_requests.needs_entry(headers):
        found = await files.read(session_id, path, part, head=True)
        verdict = conditional_requests.outcome(headers, found.entry)
        if verdict == 304:
            return Response(status_code=304, headers=_about(found.entry, filename))
        if verdict == 412:
            return precondition_failed()
        part = conditional_requests.part(headers, found.entry)
        if request.method == "HEAD":
            if part is None or part.if_range not in (None, found.entry.etag):
                found = await files.read(session_id, path, None, head=True)
            return _answer(found, part, filename, body=False)
    return _answer(await files.read(session_id, path, part), part, filename, body=True)


def _answer(
    found: Download, part: ByteRange | None, filename: str | None, *, body: bool
) -> Response:
    entry = found.entry
    if found.start is None:
        return range_not_satisfiable(entry.size)
    headers = _about(entry, filename)
    headers["Content-Length"] = str(found.stop - found.start)
    # A range that an `If-Range` turned into the whole is told as the whole.
    whole = part is None or part.if_range not in (None, entry.etag)
    if not whole:
        headers["Content-Range"] = f"bytes {found.start}-{found.stop - 1}/{entry.size}"
    status, kind = 200 if whole else 206, media_type(entry)
    if not body:
        return Response(status_code=status, headers=headers, media_type=kind)
    return StreamedFile(found.content, status, headers, kind)


def media_type(entry: FileInfo) -> str:
    return mimetypes.guess_type(entry.name)[0] or "application/octet-stream"


def _about(entry: FileInfo, filename: str | None) -> dict[str, str]:
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
    # A name, never a path, and nothing that makes it look like another one.
    safe = "".join("_" if char in "/\\" or not char.isprintable() else char for char in name)
    return f"attachment; filename*=UTF-8''{quote(safe if safe.strip('.') else 'file', safe='')}"


def archive(content: AsyncIterator[bytes], name: str, form: str) -> Response:
    headers = {
        **_SAFE,
        "Cache-Control": "no-store",
        "Content-Disposition": _attachment(f"{name}.{form}"),
    }
    return StreamedFile(content, 200, headers, MEDIA_TYPES[form])


class StreamedFile(StreamingResponse):
    """
    One whose content may fail in the middle. The connection is cut then, because an answer that has
    begun cannot say so in any other way.
    """

    async def stream_response(self, send: Send) -> None:
        try:
            await super().stream_response(send)
        except AtollError as error:
            log.info("download.cut", code=error.code, error=error.message)
