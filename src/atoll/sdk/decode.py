"""
Decodes the JSON of a response into a frozen dataclass, by the annotations of the dataclass.

Unknown members are ignored, so that newer servers can add some. A missing member, or one of another
type, raises a `PermanentError`.

If an object has an `encoded_path`, its `path` is decoded from that. Bytes that are not UTF-8 are
escaped as `os.fsdecode` does, so that the path can be used in requests.
"""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints
from urllib.parse import unquote_to_bytes

from atoll.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

T = TypeVar("T")


def decode(kind: type[T], data: Any) -> T:
    try:
        plan = _plan(cast("Hashable", kind))
        if "encoded_path" in data and "path" in plan:
            path = decode_path(data["encoded_path"])
            data = {**data, "path": path, "name": path.rpartition("/")[2]}
        return kind(**{name: plan[name](value) for name, value in data.items() if name in plan})
    except (AttributeError, TypeError, ValueError) as error:
        raise PermanentError(
            f"Cannot decode the server's response as {kind.__name__}: {error}", code="bad_answer"
        ) from None


def decode_path(encoded: str) -> str:
    """A path from its percent-encoded bytes."""
    return unquote_to_bytes(encoded).decode("utf-8", "surrogateescape")


@cache
def _plan(kind: Any) -> dict[str, Callable[[Any], Any]]:
    hints = get_type_hints(kind)
    return {field.name: _reader(hints[field.name]) for field in fields(kind)}


def _reader(hint: Any) -> Callable[[Any], Any]:
    arguments = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        inner = [_reader(argument) for argument in arguments if argument is not type(None)]
        return inner[0] if len(inner) > 1 else _optional(inner[0])
    if get_origin(hint) is tuple:
        item = _reader(arguments[0])
        return lambda values: tuple(item(value) for value in values)
    if hint is datetime:
        return datetime.fromisoformat
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: decode(hint, value)
    return lambda value: value


def _optional(inner: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else inner(value)
