"""Errors as RFC 9457 problem documents. The only place that knows status codes."""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import structlog
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from atoll.errors import (
    AtollError,
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    PermanentError,
    TemporaryError,
    TooLarge,
    Unauthenticated,
)

if TYPE_CHECKING:
    from starlette.requests import Request

log = structlog.get_logger(__name__)

_STATUS: list[tuple[type[AtollError], HTTPStatus]] = [
    (NotFound, HTTPStatus.NOT_FOUND),
    (Conflict, HTTPStatus.CONFLICT),
    (Unauthenticated, HTTPStatus.UNAUTHORIZED),
    (Forbidden, HTTPStatus.FORBIDDEN),
    (TooLarge, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    (InvalidRequest, HTTPStatus.UNPROCESSABLE_ENTITY),
    (TemporaryError, HTTPStatus.SERVICE_UNAVAILABLE),
    (PermanentError, HTTPStatus.INTERNAL_SERVER_ERROR),
]
_BY_CODE = {
    "bad_cursor": HTTPStatus.BAD_REQUEST,
    "bad_path": HTTPStatus.BAD_REQUEST,
    "bad_condition": HTTPStatus.BAD_REQUEST,
    "precondition_failed": HTTPStatus.PRECONDITION_FAILED,
    "range_not_satisfiable": HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
    "bad_json": HTTPStatus.BAD_REQUEST,
    "public_url_needed": HTTPStatus.BAD_REQUEST,
    "request_timeout": HTTPStatus.REQUEST_TIMEOUT,
    "header_too_large": HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "events_expired": HTTPStatus.GONE,
    "idempotency_in_flight": HTTPStatus.CONFLICT,
    "preload_failed": HTTPStatus.UNPROCESSABLE_ENTITY,
    "dependency_failed": HTTPStatus.UNPROCESSABLE_ENTITY,
    "packages_not_configured": HTTPStatus.UNPROCESSABLE_ENTITY,
    "interpreter_missing": HTTPStatus.UNPROCESSABLE_ENTITY,
    "image_refused": HTTPStatus.UNPROCESSABLE_ENTITY,
    "instance_failed": HTTPStatus.BAD_GATEWAY,
    "protocol_violation": HTTPStatus.BAD_GATEWAY,
    "disk_full": HTTPStatus.INSUFFICIENT_STORAGE,
    "node_full": HTTPStatus.INSUFFICIENT_STORAGE,
    "wrong_node": HTTPStatus.MISDIRECTED_REQUEST,
}
_TOO_MANY = frozenset(
    {
        "session_busy",
        "session_crowded",
        "too_many_consoles",
        "too_many_requests",
        "too_many_streams",
        "queue_full",
    }
)
"""Of what passes by itself: who asks has asked for too much at once."""
_BEHIND = {
    "database_unavailable": "The database does not answer. Nothing was lost; try again.",
    "coordination_unavailable": "Redis does not answer, so nothing new can be started; try again.",
    "blobs_unavailable": "The blob store does not answer; try again.",
    "spool_full": "The blob store does not answer and no more can wait for it; try again later.",
}
"""What is said of back-ends to those who call."""
_FRAMEWORK = {400: "bad_json", 404: "not_found", 405: "method_not_allowed"}
MAX_ERRORS = 20
"""Fields that one problem document lists."""
MEDIA_TYPE = "application/problem+json"
SIGNED = "/api/v1/signed/"
_NAMED = re.compile(r"([a-z_0-9]+): (.*)", re.DOTALL)


def status_of(error: AtollError) -> HTTPStatus:
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    if isinstance(error, TemporaryError) and error.code in _TOO_MANY:
        return HTTPStatus.TOO_MANY_REQUESTS
    return next(
        (status for kind, status in _STATUS if isinstance(error, kind)), HTTPStatus.BAD_REQUEST
    )


def problem(error: AtollError) -> Response:
    headers = {}
    if isinstance(error, TemporaryError):
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    detail = error.message
    if error.code in _BEHIND:
        # Where it is and what ails it is for the operator.
        log.warning("request.unavailable", code=error.code, error=error.message)
        detail = _BEHIND[error.code]
    return _document(status_of(error), error.code, detail, headers, error.details)


def precondition_failed(detail: str) -> Response:
    return _document(HTTPStatus.PRECONDITION_FAILED, "precondition_failed", detail)


def range_not_satisfiable(size: int) -> Response:
    return _document(
        HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
        "range_not_satisfiable",
        f"The file has {size} bytes, and none of those that were asked for.",
        {"Content-Range": f"bytes */{size}"},
    )


def _document(
    status: HTTPStatus,
    code: str,
    detail: str,
    headers: dict[str, str] | None = None,
    more: dict[str, Any] | None = None,
) -> Response:
    body = {
        "type": f"urn:atoll:problem:{code}",
        "title": status.phrase,
        "status": status.value,
        "detail": detail,
        "code": code,
        **(more or {}),
    }
    return Response(json.dumps(body), status.value, headers, MEDIA_TYPE)


def invalid(errors: list[Any]) -> InvalidRequest:
    """
    What pydantic says, as one sentence and as a list by field. Values are left out: they may be
    secret.
    """
    listed = [_told(item) for item in errors[:MAX_ERRORS]]
    if any(item["type"] == "json_invalid" for item in errors):
        return InvalidRequest("The body is not JSON.", code="bad_json", errors=listed)
    words = "; ".join(
        f"{e['field']}: {e['message']}" if e["field"] else e["message"] for e in listed
    )
    return InvalidRequest(words, errors=listed)


def _told(item: Any) -> dict[str, str]:
    field = ".".join(str(part) for part in item["loc"] if part != "body")
    message = item["msg"].removeprefix("Value error, ")
    if not field and (named := _NAMED.match(message)):
        # Said of the whole body, and of one field in it above all.
        field, message = named.groups()
    return {"field": field, "message": message}


async def on_atoll_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AtollError)
    return problem(error)


async def on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError | ValidationError)
    return problem(invalid(list(error.errors())))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the framework itself answers: no such route, no such method, a body that is no text."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    code = _FRAMEWORK.get(error.status_code, "bad_request")
    return _document(status, code, str(error.detail), dict(error.headers or {}))


async def on_unexpected(request: Request | str, error: Exception) -> Response:
    path = request if isinstance(request, str) else request.url.path
    if path.startswith(SIGNED):
        path = f"{SIGNED}…"  # What follows is as good as a key.
    log.error("request.failed", path=path, exc_info=error)
    return _document(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "internal_error",
        "Something broke here; it is in the log.",
    )
