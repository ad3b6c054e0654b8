"""
Parses JSON that user code may have written: return values, and displays of a context.
"""

from __future__ import annotations

import json
import math
from typing import Any

DEPTH = 512
"""Levels of a return value; some readers could not parse a deeper one."""


def parse_value(data: bytes, limit: int) -> tuple[bytes | None, dict[str, Any] | None]:
    """
    Parse what a process wrote to its result pipe: returns the JSON of its return value, or an
    error. The process may have written anything; invalid content becomes an error.
    """
    if not data:
        return None, None
    kind, body = data[:1], data[1:]
    try:
        if len(body) > limit and kind == b"V":
            return None, {
                "code": "return_value_too_large",
                "message": f"the return value has more than {limit} bytes of JSON",
            }
        value = strict_json(body)
        if kind == b"V":
            if body.count(b"[") + body.count(b"{") > DEPTH and not is_within(value, DEPTH):
                return None, {
                    "code": "return_value_not_json",
                    "message": f"the return value is nested deeper than {DEPTH} levels",
                }
            return body, None
        if kind == b"E" and isinstance(value, dict):
            fields = ("code", "message", "name", "traceback")
            return None, {name: str(value[name]) for name in fields if name in value}
    except (ValueError, RecursionError):
        pass
    return None, {
        "code": "return_value_not_json",
        "message": "the process wrote something to its result that is not JSON",
    }


def is_within(value: Any, depth: int) -> bool:
    """Whether a value has at most `depth` levels."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return True
    return False


def strict_json(text: bytes) -> Any:
    """Parse standard JSON only; raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _finite(text: str) -> float:
    """Rejects numbers that are too large for a float: JSON has no infinity."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(text)
    return number
