"""Parses the values of options: NAME=VALUE pairs, secrets and volumes."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from atoll.sdk.values import Mount

_READ_ONLY = {"": True, "ro": True, "rw": False}


def environment(texts: Iterable[str] | None) -> dict[str, str]:
    """Variables from `NAME=VALUE`. `NAME` alone takes the value from this process."""
    expanded = (
        f"{text}={os.environ[text]}" if "=" not in text and text in os.environ else text
        for text in texts or ()
    )
    return pairs(expanded, "--env")


def pairs(texts: Iterable[str] | None, option: str) -> dict[str, str]:
    """A dict from `NAME=VALUE`."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"expected NAME=VALUE, got {text!r}.", param_hint=option)
        found[name] = value
    return found


def secrets(names: Iterable[str] | None, files: Iterable[str] | None) -> dict[str, str]:
    """
    Secrets by name, with values from environment variables, a prompt or files. Never from the
    command line, which other users of this machine can read.
    """
    found: dict[str, str] = {}
    for name in names or ():
        if "=" in name:
            raise typer.BadParameter(
                "expected a name without a value, because other users can read command lines. The "
                "value comes from the environment variable with this name, a prompt, or "
                "--secret-file.",
                param_hint="--secret",
            )
        found[name] = os.environ.get(name) or _prompt(name)
    for name, path in pairs(files, "--secret-file").items():
        found[name] = _read(Path(path))
    return found


def _prompt(name: str) -> str:
    if not sys.stdin.isatty():
        raise typer.BadParameter(
            f"the environment variable {name} is not set, and there is no terminal for a prompt.",
            param_hint="--secret",
        )
    return str(typer.prompt(name, hide_input=True, err=True))


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{path} is not UTF-8 text.", param_hint="--secret-file") from None


def volumes(texts: Iterable[str] | None) -> "list[Mount]":
    from atoll.sdk.values import Mount

    found = []
    for text in texts or ():
        name, _, rest = text.partition(":")
        path, _, access = rest.partition(":")
        if not name or not path.startswith("/") or access not in _READ_ONLY:
            raise typer.BadParameter(
                f"expected VOLUME:PATH, VOLUME:PATH:ro or VOLUME:PATH:rw, got {text!r}.",
                param_hint="--volume",
            )
        found.append(Mount(name, path, _READ_ONLY[access]))
    return found
