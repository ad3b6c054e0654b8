"""
Cursors of lists that are no table's: a place in the list as text that fits into an address.

A cursor is of one kind of list, and is refused by the others. Nothing in it is secret, and nothing
of it is trusted but that it is text.
"""

from __future__ import annotations

import base64
import binascii

from atoll.errors import InvalidRequest


def written(kind: str, place: str | None) -> str | None:
    """`kind` is one letter. None stands for the end of the list, on both sides."""
    if place is None:
        return None
    text = f"{kind}{place}".encode("utf-8", "surrogateescape")
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def read(kind: str, cursor: str | None) -> str | None:
    if cursor is None:
        return None
    try:
        data = base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True)
        text = data.decode("utf-8", "surrogateescape")
    except (ValueError, binascii.Error):
        text = ""
    if text[:1] != kind:
        raise bad()
    return text[1:]


def bad() -> InvalidRequest:
    return InvalidRequest(
        "cursor: this was not returned by an earlier page; start again without one.",
        code="bad_cursor",
    )
