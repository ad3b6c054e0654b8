"""
Going through a tree in order of name, with a bound on memory and on depth; which names are wanted.

Runs in a worker. No link is followed below the top, and each directory is reached from the open
directory above it, so nothing that user code does meanwhile leads out. A directory comes before
what is in it. The order is the same whenever one goes, so one can go on behind any path.
"""

from __future__ import annotations

import heapq
import os
import stat

from .paths import STAGING, UPLOAD, FileError
from .removal import DIRECTORY, TRASH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

MAX_DEPTH = 128
"""What lies deeper is left out."""
MAX_PATTERN = 1024
MAX_PARTS = 64
BATCH = 2000
"""Names of one directory that are in memory at once; a larger one is read several times."""


class Pattern:
    """
    `*`, `?` and `[…]` within a name, `**` for any number of directories; none means everything.
    """

    def __init__(self, text: str) -> None:
        import fnmatch
        import re

        parts = [part for part in text.split("/") if part not in ("", ".")]
        if len(text) > MAX_PATTERN or len(parts) > MAX_PARTS or ".." in parts:
            raise FileError("bad_glob", "%s is not a pattern that can be used" % text[:200])
        try:
            self._parts = [
                None if part == "**" else re.compile(fnmatch.translate(part)) for part in parts
            ]
        except re.error as error:
            raise FileError("bad_glob", "%s cannot be read: %s" % (text, error)) from None
        self.start = self._reach({0})

    def _reach(self, states: set[int]) -> frozenset[int]:
        """With those that `**` for no directory leads to."""
        for state in sorted(states):
            while state < len(self._parts) and self._parts[state] is None:
                state += 1
                states.add(state)
        return frozenset(states)

    def after(self, states: frozenset[int], name: str) -> frozenset[int]:
        """Where one is in the pattern behind a name; nowhere when nothing below can match."""
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
        """Descriptor of the directory that it is in, until the next one is asked for."""
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
    All below the directory `top`, which stays open, beyond the path `after`. What was removed
    meanwhile and what is closed to us is left out.
    """
    levels = [_Level(os.dup(top), (), None if pattern is None else pattern.start)]
    follow = list(after)
    if follow:
        # The directories that lead to where it left off are entered without being told again.
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
        return -1  # Removed, replaced or closed to us.


def _next_names(fd: int, after: str, at_root: bool) -> list[str]:
    """The next names in order, the first one last."""
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
    """A regular file for reading; OSError for anything else."""
    # Not to hang on a pipe that stands where a file was expected.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    fd = os.open(name, flags, dir_fd=directory)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError("not a regular file")
    return fd, status
