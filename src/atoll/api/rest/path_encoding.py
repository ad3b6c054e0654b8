"""
Paths of files on the wire.

A file's name is bytes. In a URL they are percent-encoded, whatever they are. In JSON a path is text
in which what is not UTF-8 is U+FFFD, and beside it stands `encoded_path`, the same percent-encoded;
a body may give `{"encoded": "a%FF"}` wherever it may give a path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote_to_bytes

if TYPE_CHECKING:
    from starlette.requests import Request


def text_of(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def shown(path: str) -> str:
    """As it can be read."""
    if path.isascii():
        return path
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def encoded(path: str) -> str:
    """As it can stand in a URL."""
    return quote(path.encode("utf-8", "surrogateescape"), safe="/")


def decoded(text: str) -> str:
    return text_of(unquote_to_bytes(text))


def in_url(request: Request) -> str:
    """The path behind `/files/`, with its bytes as they came."""
    raw: bytes = request.scope["raw_path"]
    return text_of(unquote_to_bytes(raw.partition(b"/files/")[2]))


def in_query(request: Request, name: str = "path") -> str:
    """The last value of that name, with its bytes as they came."""
    query = request.scope["query_string"].decode("latin-1")
    pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
    return next((value for key, value in reversed(pairs) if key == name), "")
