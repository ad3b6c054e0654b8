"""Turns error responses (RFC 9457 problem documents) into exceptions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from atoll.errors import (
    AtollError,
    Conflict,
    Forbidden,
    InvalidRequest,
    NotFound,
    PermanentError,
    RequestError,
    TemporaryError,
    TooLarge,
    Unauthenticated,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

_BY_STATUS: dict[int, type[AtollError]] = {
    400: InvalidRequest,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Conflict,
    413: TooLarge,
    422: InvalidRequest,
    429: TemporaryError,
    # Sent by gateways when the server is unavailable.
    502: TemporaryError,
    503: TemporaryError,
    504: TemporaryError,
}
_STANDARD = frozenset({"type", "title", "status", "detail", "code", "instance"})


def error_from_response(
    status: int, headers: Mapping[str, str], body: bytes, key_origin: str = ""
) -> AtollError:
    """The exception for a response. `key_origin` is appended if the error concerns the key."""
    problem = _document(body)
    family = _BY_STATUS.get(status) or (RequestError if status < 500 else PermanentError)
    detail = problem.get("detail") or problem.get("title")
    words = str(detail or f"The server answered with status {status} without an explanation.")
    if key_origin and (family is Unauthenticated or problem.get("code") == "key_read_only"):
        words = f"{words} {key_origin}"
    error = family(words)
    if isinstance(problem.get("code"), str):
        error.code = problem["code"]
    error.details = {name: value for name, value in problem.items() if name not in _STANDARD}
    if isinstance(error, TemporaryError):
        error.retry_after = _seconds(headers.get("retry-after", ""), error.retry_after)
    if isinstance(error, PermanentError):
        error.cause = str(error.details.pop("cause", error.cause))
    return error


def _document(body: bytes) -> dict[str, Any]:
    try:
        problem = json.loads(body)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def _seconds(text: str, default: float) -> float:
    try:
        return max(0.0, float(text))
    except ValueError:
        return default
