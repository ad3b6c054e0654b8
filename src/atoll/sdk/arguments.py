"""
Checks the types of arguments before anything is sent.

A wrong type raises an `InvalidRequest` that names the argument. None means that an argument is not
set, and is accepted. The server checks values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

from atoll.errors import InvalidRequest


def check_string(**values: Any) -> None:
    for name, value in values.items():
        if value is not None and not isinstance(value, str):
            raise wrong_type(name, "a string", value)


def check_number(**values: Any) -> None:
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
            raise wrong_type(name, "a number", value)


def check_string_list(**lists: Any) -> None:
    """Rejects a string, although it is a sequence of strings."""
    for name, value in lists.items():
        if value is None:
            continue
        if isinstance(value, str | bytes) or not isinstance(value, Collection):
            hint = ' To run a shell command line, pass it as code with language="shell".'
            raise wrong_type(name, "a list of strings", value, hint if name == "command" else "")
        for index, item in enumerate(value):
            if not isinstance(item, str):
                raise wrong_type(f"{name}[{index}]", "a string", item)


def check_string_dict(*, nullable: bool = False, **mappings: Any) -> None:
    """Strings by name. With `nullable`, values may be None."""
    for name, value in mappings.items():
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise wrong_type(name, "a dict of strings", value)
        for key, item in value.items():
            if not isinstance(key, str):
                raise wrong_type(f"{name}: the name {key!r}", "a string", key, field=name)
            if not isinstance(item, str) and not (nullable and item is None):
                raise wrong_type(f"{name}.{key}", "a string", item)


def check_functions(**functions: Any) -> None:
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise wrong_type(name, "a function", value)


def check_quantity(**values: Any) -> None:
    """An amount such as 2, 0.5 or "512Mi"."""
    for name, value in values.items():
        number = isinstance(value, Real | Decimal) and not isinstance(value, bool)
        if value is not None and not number and not isinstance(value, str):
            raise wrong_type(name, "a number or a string", value)


def wrong_type(
    name: str, wanted: str, value: Any, hint: str = "", *, field: str | None = None
) -> InvalidRequest:
    return InvalidRequest(
        f"{name} must be {wanted}, not {type(value).__name__}.{hint}", field=field or name
    )
