"""What a session is given on the command line beside its limits."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from atoll.sdk.values import Mount

_ACCESS = {"ro": True, "rw": False}


def secrets(names: Iterable[str] | None, files: Iterable[str] | None) -> dict[str, str]:
    """By name. A command line is open to others on the machine: no value is ever taken from it."""
    found: dict[str, str] = {}
    for name in names or ():
        if "=" in name:
            raise typer.BadParameter(
                "give the name alone: a value on the command line is no secret. It is taken from "
                "the variable of that name, asked for, or read by --secret-file.",
                param_hint="--secret",
            )
        found[name] = os.environ.get(name) or _asked(name)
    for pair in files or ():
        name, equals, path = pair.partition("=")
        if not name or not equals or not path:
            raise typer.BadParameter(f"{pair!r} is not NAME=PATH.", param_hint="--secret-file")
        found[name] = _read(Path(path))
    return found


def _asked(name: str) -> str:
    if not sys.stdin.isatty():
        raise typer.BadParameter(
            f"the variable {name} is not set, and there is no terminal to ask for its value at.",
            param_hint="--secret",
        )
    return str(typer.prompt(name, hide_input=True, err=True))


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{path} is not text.", param_hint="--secret-file") from None


def volumes(texts: Iterable[str] | None) -> "list[Mount]":
    from atoll.sdk.values import Mount

    found = []
    for text in texts or ():
        name, _, rest = text.partition(":")
        path, _, access = rest.partition(":")
        if not name or not path.startswith("/") or (access or "ro") not in _ACCESS:
            raise typer.BadParameter(
                f"{text!r} is not VOLUME:PATH, VOLUME:PATH:ro or VOLUME:PATH:rw.",
                param_hint="--volume",
            )
        found.append(Mount(name, path, _ACCESS[access or "ro"]))
    return found
