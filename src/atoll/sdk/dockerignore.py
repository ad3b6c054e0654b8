"""
What the `.dockerignore` of a directory leaves out, by Docker's rules.

A line names what is left out with all beneath it, and a line with `!` what is not; the last that
fits counts. `*` and `?` stay within a name, `**` is any number of directories.
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
_WORDS = re.compile(r"\*\*/?|\*|\?|\\.|\[(?:\\.|[^]\\])+\]|.", re.DOTALL)


class Ignore:
    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._rules: list[tuple[re.Pattern[str], bool]] = []
        for number, line in enumerate(lines, 1):
            words = "" if line.startswith("#") else line.strip()
            left_out = not words.startswith("!")
            words = words.removeprefix("!").strip()
            if words:
                self._rules.append((_compiled(words, number), left_out))
        self.has_exceptions = not all(left_out for _, left_out in self._rules)

    def __contains__(self, name: str) -> bool:
        """Whether a path, as seen from the directory, is left out."""
        found = False
        for pattern, left_out in self._rules:
            # Only what would change it has to be looked at.
            if left_out is not found and pattern.fullmatch(name):
                found = left_out
        return found


def read(top: Path) -> Ignore:
    """That of a directory; it leaves out nothing when there is none."""
    try:
        with (top / FILE).open("rb") as file:
            content = file.read(MAX_SIZE + 1)
    except FileNotFoundError:
        return Ignore()
    if len(content) > MAX_SIZE:
        raise InvalidRequest(f"{top / FILE} is larger than {MAX_SIZE} bytes.")
    return Ignore(content.decode("utf-8-sig", "surrogateescape").splitlines())


def _compiled(words: str, number: int) -> re.Pattern[str]:
    clean = posixpath.normpath(words)
    if clean != "/":
        clean = clean.lstrip("/")
    found = list(_WORDS.finditer(clean))
    text = "".join(_expression(one[0], last=one.end() == len(clean)) for one in found)
    try:
        return re.compile(rf"{text}(?:/.*)?", re.DOTALL)
    except re.error as error:
        raise InvalidRequest(f"Line {number} of {FILE}, {words}: {error}.") from None


def _expression(word: str, *, last: bool) -> str:
    if word.startswith("**"):
        return ".*" if last else "(?:.*/)?"
    if word.startswith("[") and len(word) > 1:
        return word
    if word.startswith("\\") and len(word) > 1:
        return re.escape(word[1:])
    return {"*": "[^/]*", "?": "[^/]"}.get(word, re.escape(word))
