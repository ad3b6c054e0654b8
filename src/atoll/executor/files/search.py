"""
Lists directory trees and searches the content of files.

Runs in a worker, within a time limit. An answer contains what was found within the limit, and the
position from which to continue. A pattern that takes too long on a single file is an error: a timer
interrupts it.
"""

from __future__ import annotations

import os
import stat
import time

from ...protocol import minijson
from .entries import entry_of
from .paths import FileError, open_below, split
from .tree_walk import Found, Pattern, open_file, walk
from .workspace import MAX_PAGE, Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

    Finder = Callable[[bytes], "int | None"]
    """Column (characters, from 0) of the first match in a line."""

MAX_VISITED = 200_000
"""Entries that are visited for one page, whether they match or not."""
MAX_QUERY = 1000
MAX_LINE = 64 * 1024
"""A longer line is searched in pieces; a match across two pieces is not found."""
BINARY_CHECK = 8192
"""Bytes at the start of a file; one with a NUL among them is not searched."""
MAX_SHOWN = 400
"""Maximum length of a line in an answer, in characters."""


def list_tree(workspace: Workspace, request: dict[str, Any]) -> dict[str, Any]:
    """A page of the entries below a directory; fewer than `limit` if the time is over."""
    parts = split(request["path"])
    pattern = Pattern(request["glob"]) if request.get("glob") else None
    until = time.monotonic() + float(request["seconds"])
    limit = int(request["limit"])
    entries: list[dict[str, Any]] = []
    last: tuple[str, ...] = ()
    room = MAX_PAGE
    top = workspace.reach(request["path"])
    try:
        found = walk(top, at_root=not parts, pattern=pattern, after=_parts(request.get("after")))
        for visited, item in enumerate(found):
            # At least one entry a page, so that listing always makes progress.
            late = visited > MAX_VISITED or (visited and time.monotonic() > until)
            if len(entries) == limit or late:
                return {"entries": entries, "next": "/".join(last)}
            if item.matches:
                found_entry = entry_of("/".join([*parts, *item.parts]), item.status)
                room -= len(minijson.dumps(found_entry))
                if room < 0 and entries:
                    return {"entries": entries, "next": "/".join(last)}
                entries.append(found_entry)
            last = item.parts
    finally:
        os.close(top)
    return {"entries": entries, "next": None}


def _parts(path: str | None) -> tuple[str, ...]:
    return tuple(split(path)) if path else ()


# Search


class TimeOver(Exception):
    pass


def search(workspace: Workspace, request: dict[str, Any]) -> dict[str, Any]:
    import signal

    def interrupt(number: int, frame: object) -> None:
        raise TimeOver

    state = _Search(workspace, request)
    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, float(request["seconds"]))
    try:
        state.run(_finder(request))
    except TimeOver:
        if not state.progressed:
            message = "the search takes too long in %s; use a simpler pattern"
            raise FileError("search_timeout", message % "/".join(state.where)) from None
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
        """The file that is being searched."""
        self._position = (self.where, int(request.get("line") or 0))
        """The last file, and its last line that was searched; 0 if all of it was."""
        self.progressed = False
        self.more = False

    def run(self, find: Finder) -> None:
        self._find = find
        top = self._workspace.reach(self._path)
        try:
            after, line = self._position
            if line and not self._continue_file(top, line):
                return
            found = walk(top, at_root=not self._above, pattern=self._pattern, after=after)
            for item in found:
                if not self._enter(item):
                    return
        finally:
            os.close(top)

    def _continue_file(self, top: int, line: int) -> bool:
        """Search the rest of the file in which the last page ended."""
        try:
            directory = open_below(top, self.where[:-1])
            try:
                fd, _ = open_file(directory, self.where[-1])
            finally:
                os.close(directory)
        except OSError:
            return True  # Removed meanwhile.
        return self._search_file(fd, line)

    def _enter(self, item: Found) -> bool:
        if item.matches and stat.S_ISREG(item.status.st_mode):
            try:
                fd, _ = open_file(item.directory, item.parts[-1])
            except OSError:
                return True
            self.where = item.parts
            if not self._search_file(fd, 0):
                return False
        self._done(item.parts, 0)
        return True

    def _done(self, parts: tuple[str, ...], line: int) -> None:
        self._position, self.progressed = (parts, line), True

    def _search_file(self, fd: int, before: int) -> bool:
        """Search behind the line `before`; returns whether there is room for more matches."""
        with open(fd, "rb", buffering=1 << 18) as file:
            if b"\0" in os.pread(fd, BINARY_CHECK, 0):
                return True
            path = "/".join([*self._above, *self.where])
            for number, offset, piece in _lines(file):
                if number <= before:
                    continue
                if len(self._matches) == self._limit or self._room < 0:
                    self.more = True
                    return False
                start = self._find(piece)
                if start is not None:
                    text, column = _shown(piece, start)
                    match = {"path": path, "line": number, "column": offset + column, "text": text}
                    self._room -= len(minijson.dumps(match))
                    self._matches.append(match)
                self._done(self.where, number)
        return True

    def answer(self) -> dict[str, Any]:
        parts, line = self._position
        following = {"path": "/".join(parts), "line": line} if self.more else None
        return {"matches": self._matches, "next": following}


def _lines(file: Any) -> Iterator[tuple[int, int, bytes]]:
    """Line number, column offset and content of each line, or of each piece of a long one."""
    number, offset = 1, 0
    while True:
        piece = file.readline(MAX_LINE)
        if not piece:
            return
        complete = piece.endswith(b"\n")
        yield number, offset, piece.rstrip(b"\r\n") if complete else piece
        number, offset = (number + 1, 0) if complete else (number, offset + len(_text(piece)))


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _shown(piece: bytes, start: int) -> tuple[str, int]:
    """The line, or the part of a long one around the match; and the column, from 1."""
    text = _text(piece)
    first = max(0, min(start - MAX_SHOWN // 4, len(text) - MAX_SHOWN))
    return text[first : first + MAX_SHOWN], start + 1


def _finder(request: dict[str, Any]) -> Finder:
    import re

    query: str = request["query"]
    if not 0 < len(query) <= MAX_QUERY:
        raise FileError("bad_query", "a query has 1 to %d characters" % MAX_QUERY)
    if not request.get("regex") and not request.get("ignore_case"):
        needle = query.encode("utf-8", "surrogateescape")

        def find_bytes(piece: bytes) -> int | None:
            at = piece.find(needle)
            return None if at < 0 else len(_text(piece[:at]))

        return find_bytes
    try:
        flags = re.IGNORECASE if request.get("ignore_case") else 0
        compiled = re.compile(query if request.get("regex") else re.escape(query), flags)
    except (re.error, RecursionError, OverflowError, MemoryError) as error:
        raise FileError("bad_query", "the expression cannot be read: %s" % error) from None

    def find_pattern(piece: bytes) -> int | None:
        match = compiled.search(_text(piece))
        return None if match is None else match.start()

    return find_pattern
