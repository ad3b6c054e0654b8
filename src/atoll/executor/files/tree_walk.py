"""
Walks a directory tree in order of name, with bounded memory and depth, filtered by a glob pattern.

Runs in a worker. No link is followed below the top, and each directory is opened from its open
parent, so no change by user code leads out of the tree. A directory comes before its entries. The
order is always the same, so a walk can continue after any path.
"""

from __future__ import annotations

import heapq
import os
import stat

from .paths import READ_FLAGS, STAGING, UPLOAD, FileError
from .removal import DIRECTORY, TRASH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

MAX_DEPTH = 128
"""Deeper entries are left out."""
MAX_PATTERN = 1024
MAX_PARTS = 64
BATCH = 2000
"""Names of one directory that are in memory; a larger directory is read several times."""


class Pattern:
    """
    A glob: `*`, `?` and `[…]` within a name, `**` for any number of directories.
    """

    def __init__(self, text: str) -> None:
        import fnmatch
        import re

        parts = [part for part in text.split("/") if part not in ("", ".")]
        if len(text) > MAX_PATTERN or len(parts) > MAX_PARTS or ".." in parts:
            raise FileError("bad_glob", "%s is not a valid pattern" % text[:200])
        try:
            self._parts = [
                None if part == "**" else re.compile(fnmatch.translate(part)) for part in parts
            ]
        except re.error as error:
            raise FileError("bad_glob", "%s cannot be parsed: %s" % (text, error)) from None
        self.start = self._reach({0})

    def _reach(self, states: set[int]) -> frozenset[int]:
        """Add the states behind each `**`, which may match no directory."""
        for state in sorted(states):
            while state < len(self._parts) and self._parts[state] is None:
                state += 1
                states.add(state)
        return frozenset(states)

    def after(self, states: frozenset[int], name: str) -> frozenset[int]:
        """The states after a name; empty if nothing below can match."""
        found = set()
        for state in states:
            if state == len(self._parts):
                continue
            part = self._parts[state]
            if part is None:
                found.add(state)
            elif part.match(name):
                found.add(state + 1)
        return self._reach(found)

    def matches(self, states: frozenset[int]) -> bool:
        return len(self._parts) in states


class _Level:
    __slots__ = ("above", "fd", "last", "names", "states")

    def __init__(self, fd: int, above: tuple[str, ...], states: frozenset[int] | None) -> None:
        self.fd = fd
        self.above = above
        self.states = states
        self.names: list[str] = []
        self.last = ""


class Found:
    __slots__ = ("directory", "matches", "parts", "status")

    def __init__(
        self, parts: tuple[str, ...], directory: int, status: os.stat_result, matches: bool
    ) -> None:
        self.parts = parts
        self.directory = directory
        """Descriptor of its directory; valid until the next entry is requested."""
        self.status = status
        self.matches = matches


def walk(
    top: int,
    *,
    at_root: bool,
    pattern: Pattern | None = None,
    after: tuple[str, ...] = (),
    deep: bool = True,
) -> Iterator[Found]:
    """
    Iterate over all entries below the directory `top` that come after the path `after`. Leaves out
    entries that were removed meanwhile or cannot be accessed.
    """
    levels = [_Level(os.dup(top), (), None if pattern is None else pattern.start)]
    follow = list(after)
    if follow:
        # Enter the directories of that path without yielding them again.
        levels[0].last = follow[0]
        for depth, name in enumerate(follow[:-1]):
            states = levels[-1].states
            if pattern is not None and states is not None:
                states = pattern.after(states, name)
            below = _enter(levels[-1].fd, name)
            if below < 0:
                break
            levels.append(_Level(below, tuple(follow[: depth + 1]), states))
            levels[-1].last = follow[depth + 1]
        else:
            _descend(levels, follow[-1], pattern)
    try:
        while levels:
            level = levels[-1]
            if not level.names:
                level.names = _next_names(level.fd, level.last, at_root and not level.above)
                if not level.names:
                    os.close(levels.pop().fd)
                    continue
            name = level.last = level.names.pop()
            try:
                status = os.stat(name, dir_fd=level.fd, follow_symlinks=False)
            except OSError:
                continue
            states = level.states
            matches = True
            if pattern is not None and states is not None:
                states = pattern.after(states, name)
                matches = pattern.matches(states)
            yield Found((*level.above, name), level.fd, status, matches)
            if deep and stat.S_ISDIR(status.st_mode):
                _descend(levels, name, pattern)
    finally:
        for level in levels:
            os.close(level.fd)


def _descend(levels: list[_Level], name: str, pattern: Pattern | None) -> None:
    level = levels[-1]
    states = level.states
    if pattern is not None and states is not None:
        states = pattern.after(states, name)
        if not states - {len(pattern._parts)}:
            return
    if len(levels) >= MAX_DEPTH:
        return
    below = _enter(level.fd, name)
    if below >= 0:
        levels.append(_Level(below, (*level.above, name), states))


def _enter(fd: int, name: str) -> int:
    try:
        return os.open(name, DIRECTORY, dir_fd=fd)
    except OSError:
        return -1  # Removed, replaced or not accessible.


def _next_names(fd: int, after: str, at_root: bool) -> list[str]:
    """The next names, in reverse order."""
    try:
        with os.scandir(fd) as items:
            found = heapq.nsmallest(
                BATCH,
                (
                    item.name
                    for item in items
                    if item.name > after
                    and not item.name.startswith((TRASH, UPLOAD))
                    and not (at_root and item.name == STAGING)
                ),
            )
    except OSError:
        return []
    found.reverse()
    return found


def open_file(directory: int, name: str) -> tuple[int, os.stat_result]:
    """Open a regular file for reading. Raises OSError for anything else."""
    fd = os.open(name, READ_FLAGS, dir_fd=directory)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError("not a regular file")
    return fd, status
