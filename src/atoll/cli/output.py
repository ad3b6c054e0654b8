"""
Prints results: tables for people, JSON for programs.

Names and messages may come from code in a sandbox, so control characters are escaped. (The output
of a program, in `run` and `exec`, is not.)
"""

import dataclasses
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from operator import attrgetter
from typing import Any

import typer


def visible(value: object) -> str:
    text = "" if value is None else str(value)
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def one_line(value: object) -> str:
    """Also escapes line breaks, so that a file name cannot fake another entry of a list."""
    return visible(value).replace("\n", "\\n")


def _indented(text: str) -> str:
    """Indents further lines, so that they cannot fake a message of this program."""
    return visible(text).rstrip().replace("\n", "\n    ")


_errors_as_json: ContextVar[bool] = ContextVar("errors_as_json", default=False)


def errors_as_json(wanted: bool) -> bool:
    """Choose the format of `error`. The callback of every `--json` option."""
    _errors_as_json.set(wanted)
    return wanted


def as_json(value: Any, indent: int | None = 2, *, err: bool = False) -> None:
    text = json.dumps(value, default=plain, indent=indent, ensure_ascii=False)
    # JSON strings may contain control characters.
    shown = (c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
    typer.echo("".join(shown), err=err)


def line(text: str) -> None:
    typer.echo(one_line(text))


def paragraph(text: str, title: str = "") -> None:
    """Print text wrapped to the width of the terminal, after a title."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1000
    for folded in textwrap.wrap(
        one_line(text), width, initial_indent=title, subsequent_indent=" " * len(title)
    ):
        typer.echo(folded)


def result(value: Any, show: Callable[[Any], object], *, json: bool) -> None:
    """Print the value of a command: as JSON, or with `show`."""
    if isinstance(value, Iterator):
        value = list(value)
    as_json(value) if json else show(value)


def items(values: Iterable[Any], show: Callable[[Any], object], *, json: bool) -> None:
    """Print values as they arrive: one JSON object per line, or each with `show`."""
    for value in values:
        as_json(value, indent=None) if json else show(value)


def field(name: str) -> Callable[[object], None]:
    """Prints one field of a value."""
    return lambda value: line(str(getattr(value, name)))


def columns(named: Mapping[str, str | Callable[[Any], object]]) -> Callable[[Iterable[Any]], None]:
    """Prints a table of values. A column is a field, like "resources.cpu", or a function."""
    cells = [attrgetter(column) if isinstance(column, str) else column for column in named.values()]
    return lambda values: table(
        [*named], [[_cell(cell(value)) for cell in cells] for value in values]
    )


def _cell(value: object) -> object:
    return age(value) if isinstance(value, datetime) else value


def removed(value: Mapping[str, list[str]]) -> None:
    """Print the ids of `{"removed": […]}`."""
    for one in value["removed"]:
        line(one)


def error(message: str, code: str, details: Mapping[str, Any] | None = None) -> None:
    """Print an error: one line, or with `--json` an object."""
    if _errors_as_json.get():
        as_json({"code": code, "message": message, "details": dict(details or {})}, None, err=True)
        return
    typer.echo(f"error: {_indented(message)} ({one_line(code)})", err=True)


def note(message: str) -> None:
    typer.echo(f"atoll: {_indented(message)}", err=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(visible(value)) for value in row))
    # Piped output must not be wrapped.
    width = None if sys.stdout.isatty() else 1000
    Console(width=width, highlight=False, emoji=False).print(shown)


def details(value: Any) -> None:
    """Print one object, one field per line."""
    fields = value if isinstance(value, dict) else plain(value)
    table(("", ""), [(name, _short(item)) for name, item in fields.items()])


def age(at: datetime) -> str:
    seconds = max(0, int((datetime.now(UTC) - at).total_seconds()))
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def moment(at: datetime) -> str:
    return at.isoformat(sep=" ", timespec="seconds")


def size(number: float) -> str:
    """Bytes in a readable unit."""
    if number < 1024:
        return f"{number:.0f} bytes"
    units = iter(("KiB", "MiB", "GiB"))
    for unit in units:
        number /= 1024
        if number < 1024:
            return f"{number:.1f} {unit}"
    return f"{number / 1024:.1f} TiB"


def _short(value: object) -> str:
    if dataclasses.is_dataclass(value):
        value = plain(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={_short(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_short(item) for item in value)
    if isinstance(value, datetime):
        return moment(value)
    return "" if value is None else str(value)


def plain(value: Any) -> Any:
    """The value as JSON can represent it, one level deep."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, bytes):
        return value.hex()
    return str(value)
