"""Errors."""

from __future__ import annotations

from atoll.api.rest.schemas.base import ResponseBody


class Problem(ResponseBody):
    """A problem document (RFC 9457). `code` is stable: tell errors apart by it."""

    type: str
    title: str
    status: int
    detail: str
    code: str
