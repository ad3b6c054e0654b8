"""
Checks the types of arguments before anything is sent, and encodes keyword options as the body of a
request.

A wrong type raises an `InvalidRequest` that names the argument. None means that an argument is not
set, and is accepted. The server checks values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from decimal import Decimal
from functools import partial
from numbers import Real
from typing import Any

from atoll.errors import InvalidRequest
from atoll.sdk.values import Mount

Encoder = Callable[[str, Any], Any]
"""Checks a value and returns it as in the request, by the name and the value of the argument."""
Fields = Mapping[str, tuple[str, Encoder]]
"""Name in the request and encoder, by keyword."""


def encode(
    options: Mapping[str, Any], fields: Fields, *, call: str, keep_empty: bool = False
) -> dict[str, Any]:
    """
    The request body for keyword options. `call` names the method in errors. Empty lists and dicts
    are omitted unless `keep_empty` is set.
    """
    body = {}
    for name, value in options.items():
        if name not in fields:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")
        wire_name, encoder = fields[name]
        encoded = None if value is None else encoder(name, value)
        if encoded is not None and (keep_empty or encoded not in ([], {})):
            body[wire_name] = encoded
    return body


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are set."""
    return {name: value for name, value in fields.items() if value is not None}


# Checks


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


# Encoders


def _encoder(check: Callable[..., None], convert: Callable[[Any], Any]) -> Encoder:
    def encoder(name: str, value: Any) -> Any:
        check(**{name: value})
        return convert(value)

    return encoder


def unchecked(name: str, value: Any) -> Any:
    return value


def number(name: str, value: Any) -> Any:
    check_number(**{name: value})
    return value


string = _encoder(check_string, str)
quantity = _encoder(check_quantity, str)
string_list = _encoder(check_string_list, list)
string_dict = _encoder(check_string_dict, dict)
nullable_string_dict = _encoder(partial(check_string_dict, nullable=True), dict)


def milliseconds(name: str, value: Any) -> int:
    check_number(**{name: value})
    if value <= 0:
        raise InvalidRequest(f"{name} must be greater than 0 seconds.", field=name)
    return max(1, round(float(value) * 1000))


def requirements(name: str, value: Any) -> dict[str, list[str]]:
    return {"require": string_list(name, value)}


def mounts(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, Iterable):
        raise wrong_type(name, "a list of Mount", value)
    for index, mount in enumerate(value := list(value)):
        if not isinstance(mount, Mount):
            raise wrong_type(f"{name}[{index}]", "a Mount", mount)
    return [asdict(mount) for mount in value]
