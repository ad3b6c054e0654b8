"""
Every error that crosses a room of Atoll, in three families.

A `RequestError` is the caller's to mend, a `TemporaryError` passes by itself, a `PermanentError` is
recorded with its cause. The `code` is stable and part of the API; the message is for the person who
can act on it. Status codes are not known here: `api/*/problems.py` maps the families to them.
"""

from __future__ import annotations

from typing import Any


class AtollError(Exception):
    """
    The root of the families; `code` is stable, `details` are extra members of the problem document.
    """

    code = "error"

    def __init__(self, message: str, *, code: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details
        if code is not None:
            self.code = code


class RequestError(AtollError):
    """The request cannot be served as it is; sending it again unchanged gives the same answer."""

    code = "bad_request"


class InvalidRequest(RequestError):
    """A field has a value that is not allowed."""

    code = "invalid_request"


class NotFound(RequestError):
    code = "not_found"


class Conflict(RequestError):
    """The thing is in a state that does not allow this, or somebody else changed it first."""

    code = "conflict"


class Unauthenticated(RequestError):
    code = "unauthenticated"


class Forbidden(RequestError):
    code = "forbidden"


class TooLarge(RequestError):
    code = "too_large"


class TemporaryError(AtollError):
    """Nothing was done, or what was done is finished by a retry; `retry_after` is in seconds."""

    code = "unavailable"

    def __init__(
        self, message: str, *, code: str | None = None, retry_after: float = 1.0, **details: Any
    ) -> None:
        super().__init__(message, code=code, **details)
        self.retry_after = retry_after


class PermanentError(AtollError):
    """The work ended without a result and a retry would not help; `cause` is recorded with it."""

    code = "failed"

    def __init__(
        self, message: str, *, code: str | None = None, cause: str = "driver", **details: Any
    ) -> None:
        super().__init__(message, code=code, **details)
        self.cause = cause
