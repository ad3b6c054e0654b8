"""
Cursors of lists that are not tables: a position in the list as text for a URL.

A cursor belongs to one kind of list, and the others reject it. It is neither secret nor trusted.
"""

from __future__ import annotations

import base64
import binascii

from atoll.errors import InvalidRequest


def encode(kind: str, position: str | None) -> str | None:
    """`kind` is one letter. Null is the end of the list, on both sides."""
    if position is None:
        return None
    text = f"{kind}{position}".encode("utf-8", "surrogateescape")
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def decode(kind: str, cursor: str | None) -> str | None:
    if cursor is None:
        return None
    try:
        data = base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True)
        text = data.decode("utf-8", "surrogateescape")
    except (ValueError, binascii.Error):
        text = ""
    if text[:1] != kind:
        raise bad_cursor()
    return text[1:]


def bad_cursor() -> InvalidRequest:
    return InvalidRequest(
        "cursor: not a cursor of this list. Start again without one.", code="bad_cursor"
    )
