"""
Conditional requests and ranges (RFC 9110): parsing the headers and evaluating the conditions.

One range of bytes is supported; several ranges or another unit get the complete file, as the RFC
allows. `If-Match` and `If-Range` compare ETags by the strong rule.
"""

from __future__ import annotations

import re
from email.utils import format_datetime, parsedate_to_datetime
from typing import TYPE_CHECKING

from atoll.errors import InvalidRequest
from atoll.service.files.types import ByteRange

if TYPE_CHECKING:
    from datetime import datetime

    from starlette.datastructures import Headers

    from atoll.service.files.types import FileInfo

_RANGE = re.compile(r"bytes=[ \t]*(\d*)-(\d*)[ \t]*", re.ASCII | re.IGNORECASE)
_TAG = re.compile(r'[ \t]*((?:W/)?"([^"]*)"|\*)[ \t]*(?:,|$)')
_MAX_DIGITS = 19
CONDITIONAL = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since")


def parse_tags(value: str | None) -> list[str] | None:
    """The ETags of a header without quotes, weak ones with `W/`."""
    if value is None:
        return None
    found, at = [], 0
    while at < len(value):
        match = _TAG.match(value, at)
        if match is None:
            raise InvalidRequest(
                'If-Match and If-None-Match must be "*" or ETags in double quotes.',
                code="bad_condition",
            )
        whole, inner = match.group(1), match.group(2)
        found.append(f"W/{inner}" if whole.startswith("W/") else inner or whole)
        at = match.end()
    return found


def etag(entry: FileInfo) -> str | None:
    return None if entry.etag is None else f'"{entry.etag}"'


def last_modified(entry: FileInfo) -> str:
    return format_datetime(entry.modified_at.replace(microsecond=0), usegmt=True)


def is_conditional(headers: Headers) -> bool:
    return any(name in headers for name in CONDITIONAL)


def evaluate(headers: Headers, entry: FileInfo) -> int | None:
    """The status, 304 or 412, that the conditions demand; None if the request is to be served."""
    match, none = parse_tags(headers.get("if-match")), parse_tags(headers.get("if-none-match"))
    modified = entry.modified_at.replace(microsecond=0)
    if match is not None:
        if not {"*", entry.etag} & set(match):
            return 412
    elif (moment := _date(headers.get("if-unmodified-since"))) and modified > moment:
        return 412
    if none is not None:
        if {"*", entry.etag, f"W/{entry.etag}"} & set(none):
            return 304
    elif (moment := _date(headers.get("if-modified-since"))) and modified <= moment:
        return 304
    return None


def requested_range(headers: Headers, entry: FileInfo | None = None) -> ByteRange | None:
    """
    The requested range; None for the complete file. A date in `If-Range` is compared with `entry`,
    and does not match without one.
    """
    match = _RANGE.fullmatch(headers.get("range", ""))
    if match is None or not any(match.groups()):
        return None
    first, last = (int(text[:_MAX_DIGITS]) if text else None for text in match.groups())
    if first is not None and last is not None and last < first:
        return None
    condition = headers.get("if-range")
    if condition is None:
        return ByteRange(first, last)
    if condition.startswith(("W/", '"')):
        return ByteRange(first, last, condition.strip('"'))
    moment = _date(condition)
    if entry is None or moment != entry.modified_at.replace(microsecond=0):
        return None
    return ByteRange(first, last, entry.etag)


def needs_file_info(headers: Headers) -> bool:
    """Whether evaluating the headers takes the file's time or ETag."""
    dated = not headers.get("if-range", '"').startswith(("W/", '"'))
    return is_conditional(headers) or dated


def _date(value: str | None) -> datetime | None:
    if value is None:
        return None
    try:
        moment = parsedate_to_datetime(value)
    except (TypeError, ValueError, IndexError):
        return None  # The RFC demands that invalid dates are ignored.
    return moment if moment.tzinfo is not None else None
