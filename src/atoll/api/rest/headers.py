"""Reads the headers of an ASGI request, whose names are in lower case."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import Scope


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this name."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    for known, value in headers:
        if known == name:
            return value
    return None


def headers_of(scope: Scope, name: bytes) -> list[bytes]:
    """All headers of this name."""
    return [value for known, value in scope["headers"] if known == name]
