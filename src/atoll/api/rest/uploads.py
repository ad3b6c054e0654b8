"""Raw request bodies, which routes read as streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect

from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import Request


def binary_body(*kinds: str) -> dict[str, Any]:
    """The body of a route in the OpenAPI document."""
    schema = {"schema": {"type": "string", "format": "binary"}}
    return {"requestBody": {"required": True, "content": dict.fromkeys(kinds, schema)}}


async def upload_stream(request: Request) -> AsyncIterator[bytes]:
    try:
        async for piece in request.stream():
            yield piece
    except ClientDisconnect:
        raise InvalidRequest(
            "The upload was aborted: the connection was closed before its end.",
            code="upload_aborted",
        ) from None
