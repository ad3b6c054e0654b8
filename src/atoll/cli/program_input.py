"""Reads the program to run, its event and its stdin from the command line."""

import json
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from atoll.errors import InvalidRequest

LANGUAGES = {
    ".py": "python",
    ".js": "javascript",
    ".mjs": "javascript",
    ".cjs": "javascript",
    ".sh": "shell",
    ".bash": "shell",
}


@dataclass(frozen=True)
class Program:
    code: str | None = None
    language: str = "python"
    command: tuple[str, ...] | None = None
    args: tuple[str, ...] = ()
    from_stdin: bool = False


def read_script(words: list[str], language: str | None) -> Program:
    """A script file, or `-` for stdin, and its arguments."""
    name, *args = words
    if name == "-":
        code = _text(sys.stdin.buffer.read(), "The script on stdin")
        return Program(code, language or "python", args=tuple(args), from_stdin=True)
    known = language or LANGUAGES.get(Path(name).suffix.lower())
    if known is None:
        raise typer.BadParameter(
            f"cannot tell the language of {name!r} by its name. Use --language.",
            param_hint="--language",
        )
    return Program(_text(Path(name).read_bytes(), name), known, args=tuple(args))


def read_event(text: str | None) -> Any:
    return read_json(text, "--event")


def read_json(text: str | None, option: str) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"invalid JSON: {error}", param_hint=option) from None


def read_stdin(wanted: bool | None) -> str | None:
    """The piped stdin, for the program. If `wanted` is None: only if something is piped."""
    if wanted is False or sys.stdin is None or (wanted is None and not _piped()):
        return None
    return _text(sys.stdin.buffer.read(), "stdin")


def _piped() -> bool:
    """Whether stdin is a pipe, file or socket, not a terminal or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"{what} is not UTF-8 text.", code="not_text") from None
