"""
Commands that talk to a server. They take a client, `atoll`, as their first argument.

`connected` adds --url and --api-key to a command. `remote` and `streamed` also add --json, and
print what the command returns.
"""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, TypeVar

from atoll.cli import output
from atoll.cli.options import ApiKey, Json, Url, connect, declare, flat, option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from atoll.sdk.sync import Atoll

T = TypeVar("T")


def connected(command: Callable[Concatenate[Atoll, ...], T]) -> Callable[..., T]:
    """Connect before the command, which prints its result itself."""
    inner = flat(command)
    _, *own = signature(inner).parameters.values()

    def call(url: str | None, api_key: str | None, **given: Any) -> T:
        with connect(url, api_key) as atoll:
            return inner(atoll=atoll, **given)

    server = [option("url", Url), option("api_key", ApiKey)]
    return declare(call, command, sorted([*own, *server], key=lambda one: one.name == "json"))


def remote(
    *,
    line: str | None = None,
    table: Mapping[str, str | Callable[[Any], object]] | None = None,
    show: Callable[[Any], object] = output.details,
) -> Callable[[Callable[Concatenate[Atoll, ...], object]], Callable[..., None]]:
    """
    Print the value that the command returns, with --json as JSON: the field `line` of it, a `table`
    of its items, or what `show` prints.
    """
    if line is not None:
        show = output.field(line)
    elif table is not None:
        show = output.columns(table)
    return _printing(output.result, show, Json)


def streamed(
    show: Callable[[T], object], json: Any = Json
) -> Callable[[Callable[Concatenate[Atoll, ...], Iterable[T]]], Callable[..., None]]:
    """Print the values that the command returns as they arrive: with `show`, or as JSON lines."""
    return _printing(output.items, show, json)


def _printing(
    use: Callable[..., None], show: Callable[[Any], object], json: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    def decorate(command: Callable[..., Any]) -> Callable[..., None]:
        inner = flat(command)

        def call(*, json: bool, **given: Any) -> None:
            use(inner(**given), show, json=json)

        own = signature(inner).parameters.values()
        printed: Callable[..., None] = call
        return connected(declare(printed, command, [*own, option("json", json, False)]))

    return decorate
