"""
What a context shows: in the shape that is promised, or not at all.

The process says it in its own words, which user code can write as well. So nothing is shown that is
no MIME bundle, or that cannot be put into an answer again.
"""

from __future__ import annotations

from typing import Any

from atoll.link.values import is_within

TYPES = ("display", "result")
DEPTH = 64
"""Most levels of JSON within JSON; beyond the reader's own bound it could not be written again."""
VALUES = 400_000
"""Most values of JSON, keys among them, in all that one execution shows and asks."""


def shaped(line: dict[str, Any]) -> dict[str, Any] | None:
    kind, data, metadata = line.get("type"), line.get("data"), line.get("metadata")
    if kind not in TYPES or not isinstance(data, dict) or not is_within(line, DEPTH):
        return None
    return {
        "type": kind,
        "data": data,
        "metadata": metadata if isinstance(metadata, dict) else {},
    }
