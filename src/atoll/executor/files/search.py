"""
Lists of a whole tree, and search in what files hold. Runs in a worker, against a clock.

An answer has what was found in the time given, and where to go on. A pattern that takes for ever on
one file is an error and not a hang: the clock interrupts it, and the next page begins behind what
was done.
"""

from __future__ import annotations

import os
import stat
import time

from ...protocol import minijson
from .entries import entry_of
from .paths import FileError, split
from .tree_walk import Found, Pattern, open_file, walk
from .workspace import MAX_PAGE, Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

    Finder = Callable[[bytes], "tuple[int, int] | None"]
    """Column (characters, from 0) of the first match in a line, and the match's length."""

MAX_LOOKED_AT = 200_000
"""Entries of one page, whether wanted or not."""
MAX_QUERY = 1000
MAX_LINE = 64 * 1024
"""A longer line is taken in pieces; what lies across two of them is not found."""
SNIFFED = 8192
SHOWN = 400
"""Characters of a line."""


def list_tree(workspace: Workspace, request: dict[str, Any]) -> dict[str, Any]:
    """A page of what is below a directory, in order: as many as `limit`, or fewer and more."""
    parts = split(request["path"])
    pattern = Pattern(request["glob"]) if request.get("glob") else None
    until = time.monotonic() + float(request["seconds"])
    limit = int(request["limit"])
    entries: list[dict[str, Any]] = []
    last: tuple[str, ...] = ()
    room = MAX_PAGE
    with _Opened(workspace, request["path"]) as top:
        found = walk(top, at_root=not parts, pattern=pattern, after=_parts(request.get("after")))
        for looked_at, item in enumerate(found):
            # One at least, so that page by page all is seen.
            late = looked_at > MAX_LOOKED_AT or (looked_at and time.monotonic() > until)
            if len(entries) == limit or late:
                return {"entries": entries, "next": "/".join(last)}
            if item.matches:
                found_entry = entry_of("/".join([*parts, *item.parts]), item.status)
                room -= len(minijson.dumps(found_entry))
                if room < 0 and entries:
                    return {"entries": entries, "next": "/".join(last)}
                entries.append(found_entry)
            last = item.parts
    return {"entries": entries, "next": None}


class _Opened:
    def __init__(self, workspace: Workspace, path: str) -> None:
        self._fd = workspace.reach(path)

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def _parts(path: str | None) -> tuple[str, ...]:
    return tuple(split(path)) if path else ()


# Search


class Late(Exception):
    """The time is over."""


def search(workspace: Workspace, request: dict[str, Any]) -> dict[str, Any]:
    import signal

    def late(number: int, frame: object) -> None:
        raise Late

    state = _Search(workspace, request)
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, float(request["seconds"]))
    try:
        state.run(_finder(request))
    except Late:
        if not state.moved:
            words = "looking for this takes too long, in %s above all; use a simpler pattern"
            raise FileError("search_timeout", words % "/".join(state.where)) from None
        state.more = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return state.answer()


class _Search:
    def __init__(self, workspace: Workspace, request: dict[str, Any]) -> None:
        self._workspace = workspace
        self._path = request["path"]
        self._above = split(request["path"])
        self._pattern = Pattern(request["glob"]) if request.get("glob") else None
        self._limit = int(request["limit"])
        self._find: Finder = lambda piece: None
        self._matches: list[dict[str, Any]] = []
        self._room = MAX_PAGE
        self.where = _parts(request.get("after"))
        """The file that is looked at."""
        self._place = (self.where, int(request.get("line") or 0))
        """What was done last: a file, and a line in it or 0 for all of it."""
        self.moved = False
        self.more = False

    def run(self, find: Finder) -> None:
        self._find = find
        with _Opened(self._workspace, self._path) as top:
            after, line = self._place
            if line and not self._again(top, line):
                return
            found = walk(top, at_root=not self._above, pattern=self._pattern, after=after)
            for item in found:
                if not self._enter(item):
                    return

    def _again(self, top: int, line: int) -> bool:
        """The rest of the file that the last page ended in."""
        directory = os.dup(top)
        try:
            for part in self.where[:-1]:
                below = os.open(
                    part, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_RDONLY, dir_fd=directory
                )
                os.close(directory)
                directory = below
            fd, _ = open_file(directory, self.where[-1])
        except OSError:
            return True  # Gone meanwhile.
        finally:
            os.close(directory)
        return self._look_into(fd, line)

    def _enter(self, item: Found) -> bool:
        if item.matches and stat.S_ISREG(item.status.st_mode):
            try:
                fd, _ = open_file(item.directory, item.parts[-1])
            except OSError:
                return True
            self.where = item.parts
            if not self._look_into(fd, 0):
                return False
        self._done(item.parts, 0)
        return True

    def _done(self, parts: tuple[str, ...], line: int) -> None:
        self._place, self.moved = (parts, line), True

    def _look_into(self, fd: int, before: int) -> bool:
        """What is behind the line `before`; whether there is room for more."""
        with open(fd, "rb", buffering=1 << 18) as file:
            if b"\0" in os.pread(fd, SNIFFED, 0):
                return True
            path = "/".join([*self._above, *self.where])
            for number, offset, piece in _lines(file):
                if number <= before:
                    continue
                if len(self._matches) == self._limit or self._room < 0:
                    self.more = True
                    return False
                hit = self._find(piece)
                if hit is not None:
                    text, column = _shown(piece, *hit)
                    match = {"path": path, "line": number, "column": offset + column, "text": text}
                    self._room -= len(minijson.dumps(match))
                    self._matches.append(match)
                self._done(self.where, number)
        return True

    def answer(self) -> dict[str, Any]:
        parts, line = self._place
        following = {"path": "/".join(parts), "line": line} if self.more else None
        return {"matches": self._matches, "next": following}


def _lines(file: Any) -> Iterator[tuple[int, int, bytes]]:
    """Number, characters before, and content of each line, or each piece of a long one."""
    number, offset = 1, 0
    while True:
        piece = file.readline(MAX_LINE)
        if not piece:
            return
        whole = piece.endswith(b"\n")
        yield number, offset, piece.rstrip(b"\r\n") if whole else piece
        number, offset = (number + 1, 0) if whole else (number, offset + len(_text(piece)))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _shown(piece: bytes, start: int, length: int) -> tuple[str, int]:
    """The line, or what of a long one is around the match; and the column, from 1."""
    text = _text(piece)
    first = max(0, min(start - SHOWN // 4, len(text) - SHOWN))
    return text[first : first + SHOWN], start + 1


def _finder(request: dict[str, Any]) -> Finder:
    import re

    query: str = request["query"]
    if not 0 < len(query) <= MAX_QUERY:
        raise FileError("bad_query", "a query has 1 to %d characters" % MAX_QUERY)
    if not request.get("regex") and not request.get("ignore_case"):
        needle = query.encode("utf-8", "surrogateescape")

        def find_bytes(piece: bytes) -> tuple[int, int] | None:
            at = piece.find(needle)
            return None if at < 0 else (len(_text(piece[:at])), len(query))

        return find_bytes
    try:
        flags = re.IGNORECASE if request.get("ignore_case") else 0
        compiled = re.compile(query if request.get("regex") else re.escape(query), flags)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        raise FileError("bad_query", "the expression cannot be read: %s" % error) from None

    def find_pattern(piece: bytes) -> tuple[int, int] | None:
        match = compiled.search(_text(piece))
        return None if match is None else (match.start(), match.end() - match.start())

    return find_pattern
