"""JSON responses, written without validating our own output again."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

_encode = json.JSONEncoder(separators=(",", ":")).encode


def encode_json(content: Any) -> bytes:
    return _encode(content).encode("ascii")


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content)


def with_age(content: dict[str, Any], age: float | None) -> JsonResponse:
    """`age` is in seconds, of a record that is shown from memory while the database is away."""
    if age is None:
        return JsonResponse(content)
    headers = {"Age": str(int(age)), "Warning": '110 - "Response is Stale"'}
    return JsonResponse({**content, "stale": True}, headers=headers)


def page_of(items: list[Any], next_cursor: str | None) -> JsonResponse:
    return JsonResponse({"items": items, "next_cursor": next_cursor})
