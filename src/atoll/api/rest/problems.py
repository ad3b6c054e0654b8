"""
Problem documents (RFC 9457) for errors. No other module knows which status code an error has.

A class of errors has a status, and so have the codes that clients rely on and that the class does
not decide: some of them come from the executor or from a driver.
"""

from __future__ import annotations

import json
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import structlog
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from atoll.api.rest.schemas.base import ResponseBody
from atoll.errors import (
    AtollError,
    BlobsUnavailable,
    Conflict,
    CoordinationUnavailable,
    DatabaseUnavailable,
    DependencyFailed,
    Forbidden,
    InvalidRequest,
    NodeFull,
    NotFound,
    PermanentError,
    RequestError,
    SpoolFull,
    TemporaryError,
    TooLarge,
    Unauthenticated,
)

if TYPE_CHECKING:
    from starlette.requests import Request

log = structlog.get_logger(__name__)

_BY_CLASS: dict[type[AtollError], HTTPStatus] = {
    AtollError: HTTPStatus.BAD_REQUEST,
    RequestError: HTTPStatus.BAD_REQUEST,
    NotFound: HTTPStatus.NOT_FOUND,
    Conflict: HTTPStatus.CONFLICT,
    Unauthenticated: HTTPStatus.UNAUTHORIZED,
    Forbidden: HTTPStatus.FORBIDDEN,
    TooLarge: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    InvalidRequest: HTTPStatus.UNPROCESSABLE_ENTITY,
    TemporaryError: HTTPStatus.SERVICE_UNAVAILABLE,
    NodeFull: HTTPStatus.INSUFFICIENT_STORAGE,
    PermanentError: HTTPStatus.INTERNAL_SERVER_ERROR,
    DependencyFailed: HTTPStatus.UNPROCESSABLE_ENTITY,
}
_BY_CODE = {
    "bad_condition": HTTPStatus.BAD_REQUEST,
    "bad_cursor": HTTPStatus.BAD_REQUEST,
    "bad_json": HTTPStatus.BAD_REQUEST,
    "bad_path": HTTPStatus.BAD_REQUEST,
    "public_url_needed": HTTPStatus.BAD_REQUEST,
    "request_timeout": HTTPStatus.REQUEST_TIMEOUT,
    "idempotency_in_flight": HTTPStatus.CONFLICT,
    "events_expired": HTTPStatus.GONE,
    "precondition_failed": HTTPStatus.PRECONDITION_FAILED,
    "range_not_satisfiable": HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
    "wrong_node": HTTPStatus.MISDIRECTED_REQUEST,
    "dependency_failed": HTTPStatus.UNPROCESSABLE_ENTITY,
    "image_not_pulled": HTTPStatus.UNPROCESSABLE_ENTITY,
    "image_refused": HTTPStatus.UNPROCESSABLE_ENTITY,
    "interpreter_missing": HTTPStatus.UNPROCESSABLE_ENTITY,
    "packages_not_configured": HTTPStatus.UNPROCESSABLE_ENTITY,
    "preload_failed": HTTPStatus.UNPROCESSABLE_ENTITY,
    "header_too_large": HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "instance_failed": HTTPStatus.BAD_GATEWAY,
    "protocol_violation": HTTPStatus.BAD_GATEWAY,
    "disk_full": HTTPStatus.INSUFFICIENT_STORAGE,
    "node_full": HTTPStatus.INSUFFICIENT_STORAGE,
}
_TOO_MANY_REQUESTS = frozenset(
    {
        "queue_full",
        "session_busy",
        "session_crowded",
        "too_many_consoles",
        "too_many_requests",
        "too_many_streams",
    }
)
"""Codes of temporary errors. A `Conflict` may have the same code, and its own status."""
_PUBLIC_DETAILS: dict[type[AtollError], str] = {
    DatabaseUnavailable: "The database is unavailable. Nothing was lost; retry in a few seconds.",
    CoordinationUnavailable: "Redis is unavailable, so nothing new can be started. Retry in a few "
    "seconds.",
    BlobsUnavailable: "The blob store is unavailable. Retry in a few seconds.",
    SpoolFull: "The blob store is unavailable and its local buffer is full. Retry later.",
}
"""Clients get this instead of the message, which may contain addresses and is for the operator."""
_FRAMEWORK_CODES = {400: "bad_json", 404: "not_found", 405: "method_not_allowed"}

RETRYABLE = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
NODE_REFUSALS = frozenset(
    {
        HTTPStatus.MISDIRECTED_REQUEST,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.INSUFFICIENT_STORAGE,
    }
)
"""Statuses with which a node refuses a request that another node may be able to serve."""
MAX_LISTED_ERRORS = 20
MEDIA_TYPE = "application/problem+json"
SIGNED = "/api/v1/signed/"
_FIELD_PREFIX = re.compile(r"([a-z_0-9]+): (.*)", re.DOTALL)


class Problem(ResponseBody):
    """A problem document (RFC 9457). `code` is stable: tell errors apart by it."""

    type: str
    title: str
    status: int
    detail: str
    code: str


def status_of(error: AtollError) -> HTTPStatus:
    if isinstance(error, TemporaryError) and error.code in _TOO_MANY_REQUESTS:
        return HTTPStatus.TOO_MANY_REQUESTS
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    return next(_BY_CLASS[kind] for kind in type(error).__mro__ if kind in _BY_CLASS)


def problem(error: AtollError) -> Response:
    headers = {}
    if isinstance(error, TemporaryError):
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    detail = error.message
    for kind, text in _PUBLIC_DETAILS.items():
        if isinstance(error, kind):
            log.warning("request.unavailable", code=error.code, error=error.message)
            detail = text
    return _document(status_of(error), error.code, detail, headers, error.details)


def precondition_failed() -> Response:
    detail = "The file does not match the request's If-Match or If-Unmodified-Since header."
    return _document(HTTPStatus.PRECONDITION_FAILED, "precondition_failed", detail)


def range_not_satisfiable(size: int) -> Response:
    return _document(
        HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
        "range_not_satisfiable",
        f"The requested range is outside the file, which has {size} bytes.",
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
    Pydantic's errors as one sentence and as a list by field. Values are left out: they may be
    secret.
    """
    listed = [_field_error(item) for item in errors[:MAX_LISTED_ERRORS]]
    if any(item["type"] == "json_invalid" for item in errors):
        return InvalidRequest("The request body is not valid JSON.", code="bad_json", errors=listed)
    message = "; ".join(
        f"{e['field']}: {e['message']}" if e["field"] else e["message"] for e in listed
    )
    return InvalidRequest(message, errors=listed)


def _field_error(item: Any) -> dict[str, str]:
    field = ".".join(str(part) for part in item["loc"] if part != "body")
    message = item["msg"].removeprefix("Value error, ")
    if not field and (named := _FIELD_PREFIX.match(message)):
        # From a validator of several fields, which names the one to change.
        field, message = named.groups()
    return {"field": field, "message": message}


async def on_atoll_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AtollError)
    return problem(error)


async def on_validation_error(request: Request, error: Exception) -> Response:
    from fastapi.exceptions import RequestValidationError

    assert isinstance(error, RequestValidationError | ValidationError)
    return problem(invalid(list(error.errors())))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Errors of the framework itself: unknown routes and methods, bodies that are not text."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    code = _FRAMEWORK_CODES.get(error.status_code, "bad_request")
    return _document(status, code, str(error.detail), dict(error.headers or {}))


async def on_unexpected(request: Request | str, error: Exception) -> Response:
    path = request if isinstance(request, str) else request.url.path
    if path.startswith(SIGNED):
        path = f"{SIGNED}…"  # The rest of it works like a key.
    log.error("request.failed", path=path, exc_info=error)
    return _document(
        HTTPStatus.INTERNAL_SERVER_ERROR,
        "internal_error",
        "Internal error. See the server log.",
    )
