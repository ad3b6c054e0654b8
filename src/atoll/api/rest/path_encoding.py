"""
Paths of files on the wire.

File names are bytes. In URLs they are percent-encoded. In JSON, `path` is text in which bytes that
are not UTF-8 are U+FFFD, and `encoded_path` is the exact path, percent-encoded. Requests may give
`{"encoded": "a%FF"}` wherever they may give a path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote_to_bytes

if TYPE_CHECKING:
    from starlette.requests import Request


def from_bytes(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def readable(path: str) -> str:
    if path.isascii():
        return path
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def percent_encoded(path: str) -> str:
    return quote(path.encode("utf-8", "surrogateescape"), safe="/")


def percent_decoded(text: str) -> str:
    return from_bytes(unquote_to_bytes(text))


def path_in_url(request: Request) -> str:
    """The exact path after `/files/`."""
    raw: bytes = request.scope["raw_path"]
    return from_bytes(unquote_to_bytes(raw.partition(b"/files/")[2]))


def path_in_query(request: Request, name: str = "path") -> str:
    """The exact path in the query: the last value of that name."""
    query = request.scope["query_string"].decode("latin-1")
    pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
    return next((value for key, value in reversed(pairs) if key == name), "")
