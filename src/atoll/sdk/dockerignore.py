"""
Files that the `.dockerignore` of a directory excludes, by Docker's rules.

A line excludes a path with everything below it, and a line with `!` includes it again; the last
match counts. `*` and `?` match within a name, `**` matches any number of directories.
"""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FILE = ".dockerignore"
MAX_SIZE = 1024 * 1024
_TOKENS = re.compile(r"\*\*/?|\*|\?|\\.|\[(?:\\.|[^]\\])+\]|.", re.DOTALL)


class Ignore:
    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._rules: list[tuple[re.Pattern[str], bool]] = []
        for number, line in enumerate(lines, 1):
            pattern = "" if line.startswith("#") else line.strip()
            excluded = not pattern.startswith("!")
            pattern = pattern.removeprefix("!").strip()
            if pattern:
                self._rules.append((_compiled(pattern, number), excluded))
        self.has_exceptions = not all(excluded for _, excluded in self._rules)

    def __contains__(self, name: str) -> bool:
        """Whether a path relative to the directory is excluded."""
        found = False
        for rule, excluded in self._rules:
            # Only a rule that would change the outcome needs matching.
            if excluded is not found and rule.fullmatch(name):
                found = excluded
        return found


def read(top: Path) -> Ignore:
    """The rules of a directory. Without a file nothing is excluded."""
    try:
        with (top / FILE).open("rb") as file:
            content = file.read(MAX_SIZE + 1)
    except FileNotFoundError:
        return Ignore()
    if len(content) > MAX_SIZE:
        raise InvalidRequest(f"{top / FILE} is larger than {MAX_SIZE} bytes.")
    return Ignore(content.decode("utf-8-sig", "surrogateescape").splitlines())


def _compiled(pattern: str, number: int) -> re.Pattern[str]:
    clean = posixpath.normpath(pattern)
    if clean != "/":
        clean = clean.lstrip("/")
    found = list(_TOKENS.finditer(clean))
    text = "".join(_expression(one[0], last=one.end() == len(clean)) for one in found)
    try:
        return re.compile(rf"{text}(?:/.*)?", re.DOTALL)
    except re.error as error:
        raise InvalidRequest(f"Line {number} of {FILE}, {pattern}: {error}.") from None


def _expression(word: str, *, last: bool) -> str:
    if word.startswith("**"):
        return ".*" if last else "(?:.*/)?"
    if word.startswith("[") and len(word) > 1:
        return word
    if word.startswith("\\") and len(word) > 1:
        return re.escape(word[1:])
    return {"*": "[^/]*", "?": "[^/]"}.get(word, re.escape(word))
