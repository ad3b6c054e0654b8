"""
Encodes keyword options as the body of a request, and checks their types on the way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from atoll.errors import InvalidRequest
from atoll.sdk.arguments import (
    check_number,
    check_quantity,
    check_string,
    check_string_dict,
    check_string_list,
    wrong_type,
)
from atoll.sdk.dependencies import dependencies_body
from atoll.sdk.values import Mount

Encoder = Callable[[str, Any], Any]
Fields = Mapping[str, tuple[str, Encoder]]
"""Name in the request and encoder, by keyword."""

F = TypeVar("F", bound=Callable[..., Any])


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


def show_options(function: F) -> F:
    """
    Expand `**options: Unpack[…]` in the signature that `help()` and notebooks show. Type checkers
    and editors do that themselves.
    """
    from atoll.sdk import options

    kind = function.__annotations__["options"].removeprefix("Unpack[").removesuffix("]")
    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    named += [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=annotation.__forward_arg__,
        )
        for name, annotation in getattr(options, kind).__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function


def unchecked(name: str, value: Any) -> Any:
    return value


def string(name: str, value: Any) -> str:
    check_string(**{name: value})
    return str(value)


def number(name: str, value: Any) -> Any:
    check_number(**{name: value})
    return value


def milliseconds(name: str, value: Any) -> int:
    check_number(**{name: value})
    if value <= 0:
        raise InvalidRequest(f"{name} must be greater than 0 seconds.", field=name)
    return max(1, round(float(value) * 1000))


def quantity(name: str, value: Any) -> str:
    check_quantity(**{name: value})
    return str(value)


def string_list(name: str, value: Any) -> list[str]:
    check_string_list(**{name: value})
    return list(value)


def string_dict(name: str, value: Any) -> dict[str, str]:
    check_string_dict(**{name: value})
    return dict(value)


def nullable_string_dict(name: str, value: Any) -> dict[str, str | None]:
    check_string_dict(nullable=True, **{name: value})
    return dict(value)


def packages(name: str, value: Any) -> list[dict[str, str]]:
    return dependencies_body(value)


def requirements(name: str, value: Any) -> dict[str, list[str]]:
    return {"require": string_list(name, value)}


def mounts(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, Iterable):
        raise wrong_type(name, "a list of Mount", value)
    for index, mount in enumerate(value := list(value)):
        if not isinstance(mount, Mount):
            raise wrong_type(f"{name}[{index}]", "a Mount", mount)
    return [asdict(mount) for mount in value]
