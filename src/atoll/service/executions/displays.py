"""
MIME bundles that a context displays.

User code can write to the same channel, so a line that is not a MIME bundle, or that could not be
encoded in a response again, is dropped.
"""

from __future__ import annotations

from typing import Any

from atoll.link.values import is_within

TYPES = ("display", "result")
MAX_DEPTH = 64
"""Levels of nested JSON; deeper JSON could not be encoded again."""
MAX_VALUES = 400_000
"""Values of JSON, keys included, in all displays and questions of one execution."""


def display_of(line: dict[str, Any]) -> dict[str, Any] | None:
    """The MIME bundle on a line of user code; None if it is not one."""
    kind, data, metadata = line.get("type"), line.get("data"), line.get("metadata")
    if kind not in TYPES or not isinstance(data, dict) or not is_within(line, MAX_DEPTH):
        return None
    return {
        "type": kind,
        "data": data,
        "metadata": metadata if isinstance(metadata, dict) else {},
    }
