"""
Watches a tree for changes and reports them: created, modified, deleted, moved.

Runs in a worker. Uses inotify if the kernel has it, or else compares listings every second. Memory
is bounded: events that a slow reader does not take wait in the kernel, which drops them when they
are too many. The reader then receives `overflow` and has to list the tree again. Changes to one
file in quick succession may be reported as one.
"""

from __future__ import annotations

import os
import select
import stat
import struct
import time

from ...protocol import minijson
from .. import syscalls
from ..workers import WorkerStream
from .paths import STAGING, UPLOAD, split
from .removal import DIRECTORY, TRASH
from .tree_walk import walk
from .workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Change = dict[str, Any]

MAX_WATCHES = 8192
"""Directories that are watched at the same time."""
BATCH_DELAY = 0.05
POLL_INTERVAL = 1.0
MAX_POLLED = 20_000
"""Entries of a listing that is compared."""
READ = 256 * 1024

_EVENT = struct.Struct("iIII")
_MODIFY, _ATTRIB = 0x2, 0x4
_FROM, _TO, _CREATE, _DELETE = 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _OVERFLOW, _IGNORED, _ISDIR = 0x400, 0x4000, 0x8000, 0x4000_0000
_ONLYDIR, _EXCL_UNLINK = 0x0100_0000, 0x0400_0000
_MASK = _MODIFY | _ATTRIB | _FROM | _TO | _CREATE | _DELETE | _DELETE_SELF | _ONLYDIR | _EXCL_UNLINK


def follow(workspace: Workspace, request: dict[str, Any], stream: WorkerStream) -> dict[str, Any]:
    """Ends when the stream is closed or the directory itself is removed."""
    parts = split(request["path"])
    top = workspace.reach(request["path"])
    recursive = bool(request["recursive"])
    fd = -1 if request.get("poll") else syscalls.inotify()
    if fd < 0:
        _PollingWatch(top, parts, recursive, stream).run()
    else:
        _InotifyWatch(fd, top, parts, recursive, stream).run()
    return {}


def _send(stream: WorkerStream, changes: list[Change]) -> None:
    if changes:
        stream.send(b"".join(minijson.dumps(change) + b"\n" for change in changes))


def _is_reserved(name: str, at_root: bool) -> bool:
    return name.startswith((TRASH, UPLOAD)) or (at_root and name == STAGING)


class _InotifyWatch:
    def __init__(
        self, fd: int, top: int, parts: list[str], recursive: bool, stream: WorkerStream
    ) -> None:
        self._fd = fd
        self._top = top
        self._above = parts
        self._recursive = recursive
        self._stream = stream
        self._paths: dict[int, tuple[str, ...]] = {}
        self._numbers: dict[tuple[str, ...], int] = {}
        self._cut = False
        """Whether there are more directories than are watched; reported once."""
        self._changes: list[Change] = []
        self._moved: tuple[int, tuple[str, ...], bool] | None = None
        """Cookie, path and kind of an entry that was moved from here and may arrive elsewhere."""

    def run(self) -> None:
        self._add((), self._top)
        if self._recursive:
            self._add_below((), report=False)
        self._stream.event({"event": "watching"})
        poll = select.poll()
        poll.register(self._stream.fd, select.POLLIN)
        while self._numbers.get(()) is not None:
            # Without credit nothing is read: the kernel queues the events.
            if self._stream.credit > 0:
                poll.register(self._fd, select.POLLIN)
            else:
                poll.register(self._fd, 0)
            wait = BATCH_DELAY if self._moved is not None else POLL_INTERVAL
            ready = dict(poll.poll(wait * 1000))
            if not ready and os.fstat(self._top).st_nlink == 0:
                return  # The kernel sends no event for an open directory that is removed.
            if self._stream.fd in ready:
                self._stream.wait()
            if self._fd in ready:
                # Events in quick succession are reported together.
                time.sleep(BATCH_DELAY)
                self._read()
            elif self._moved is not None:
                self._settle()
            changes, self._changes = self._changes, []
            _send(self._stream, changes)

    def _read(self) -> None:
        data = os.read(self._fd, READ)
        at = 0
        while at < len(data):
            number, mask, cookie, size = _EVENT.unpack_from(data, at)
            raw = data[at + _EVENT.size : at + _EVENT.size + size].rstrip(b"\0")
            at += _EVENT.size + size
            self._handle(number, mask, cookie, os.fsdecode(raw))

    def _handle(self, number: int, mask: int, cookie: int, name: str) -> None:
        if mask & _OVERFLOW:
            self._settle()
            self._report("overflow", ())
            if self._recursive:
                self._add_below((), report=False)
            return
        above = self._paths.get(number)
        if above is None:
            return
        if mask & (_IGNORED | _DELETE_SELF):
            if mask & _IGNORED:
                self._forget(above)
            return
        if not name:
            return  # The directory itself; its parent's watch reports it.
        path = (*above, name)
        directory = bool(mask & _ISDIR)
        hidden = _is_reserved(name, not self._above and not above)
        if mask & _TO:
            self._arrived(path, cookie, directory, hidden)
            return
        self._settle()
        if hidden:
            return
        if mask & _FROM:
            self._moved = (cookie, path, directory)
        elif mask & _CREATE:
            self._report("created", path)
            if directory and self._recursive:
                self._enter(path, report=True)
        elif mask & _DELETE:
            self._report("deleted", path)
            if directory:
                self._drop(path)
        elif not directory or mask & _ATTRIB:
            self._report("modified", path)

    def _arrived(self, path: tuple[str, ...], cookie: int, directory: bool, hidden: bool) -> None:
        moved, self._moved = self._moved, None
        if moved is not None and moved[0] != cookie:
            self._moved = moved
            self._settle()
            moved = None
        if moved is not None:
            if hidden:
                self._report("deleted", moved[1])
                self._drop(moved[1])
                return
            self._report("moved", path, moved[1])
            if directory:
                self._rename(moved[1], path)
        elif not hidden:
            # From a place that is not watched, for example a completed upload.
            self._report("created", path)
            if directory and self._recursive:
                self._enter(path, report=True)

    def _settle(self) -> None:
        """An entry that was moved away and did not arrive here counts as deleted."""
        if self._moved is not None:
            _, path, directory = self._moved
            self._moved = None
            self._report("deleted", path)
            if directory:
                self._drop(path)

    def _report(
        self, kind: str, path: tuple[str, ...], source: tuple[str, ...] | None = None
    ) -> None:
        change: Change = {"type": kind, "path": "/".join([*self._above, *path])}
        if source is not None:
            change["from"] = "/".join([*self._above, *source])
        if change not in self._changes[-8:]:
            self._changes.append(change)

    # Watches

    def _add(self, path: tuple[str, ...], fd: int) -> bool:
        if len(self._paths) < MAX_WATCHES:
            # By descriptor: another directory may have its name by now.
            number = syscalls.inotify_add(self._fd, b"/proc/self/fd/%d" % fd, _MASK)
            if number >= 0:
                self._paths[number] = path
                self._numbers[path] = number
                return True
        if not self._cut:
            self._cut = True
            self._report("overflow", path)
        return False

    def _enter(self, path: tuple[str, ...], *, report: bool) -> None:
        here = os.dup(self._top)
        try:
            for part in path:
                below = os.open(part, DIRECTORY, dir_fd=here)
                os.close(here)
                here = below
            if self._add(path, here):
                self._add_below(path, report=report, top=here)
        except OSError:
            pass  # StreamClosed again.
        finally:
            os.close(here)

    def _add_below(self, path: tuple[str, ...], *, report: bool, top: int | None = None) -> None:
        """With `report`, entries that exist already are reported as created."""
        at_root = not self._above and not path
        for item in walk(self._top if top is None else top, at_root=at_root):
            found = (*path, *item.parts)
            if report and len(self._changes) < MAX_POLLED:
                self._report("created", found)
            if stat.S_ISDIR(item.status.st_mode) and found not in self._numbers:
                try:
                    fd = os.open(item.parts[-1], DIRECTORY, dir_fd=item.directory)
                except OSError:
                    continue
                try:
                    if not self._add(found, fd):
                        return
                finally:
                    os.close(fd)

    def _below(self, path: tuple[str, ...]) -> list[tuple[str, ...]]:
        return [known for known in self._numbers if known[: len(path)] == path]

    def _rename(self, old: tuple[str, ...], new: tuple[str, ...]) -> None:
        for known in self._below(old):
            number = self._numbers.pop(known)
            renamed = (*new, *known[len(old) :])
            self._numbers[renamed] = number
            self._paths[number] = renamed

    def _drop(self, path: tuple[str, ...]) -> None:
        for known in self._below(path):
            syscalls.inotify_remove(self._fd, self._numbers[known])
            self._forget(known)

    def _forget(self, path: tuple[str, ...]) -> None:
        number = self._numbers.pop(path, None)
        if number is not None:
            self._paths.pop(number, None)


class _PollingWatch:
    def __init__(self, top: int, parts: list[str], recursive: bool, stream: WorkerStream) -> None:
        self._top = top
        self._above = parts
        self._recursive = recursive
        self._stream = stream
        self._cut = False

    def run(self) -> None:
        known = self._list()
        self._stream.event({"event": "watching"})
        poll = select.poll()
        poll.register(self._stream.fd, select.POLLIN)
        while True:
            if poll.poll(POLL_INTERVAL * 1000):
                self._stream.wait()
                continue
            if os.fstat(self._top).st_nlink == 0:
                return
            now = self._list()
            _send(self._stream, self._differences(known, now))
            known = now

    def _list(self) -> dict[str, tuple[int, int, int, bool]]:
        found: dict[str, tuple[int, int, int, bool]] = {}
        self._full = False
        for item in walk(self._top, at_root=not self._above, deep=self._recursive):
            if len(found) >= MAX_POLLED:
                self._full = True
                break
            status = item.status
            directory = stat.S_ISDIR(status.st_mode)
            changed = 0 if directory else status.st_ctime_ns
            found["/".join([*self._above, *item.parts])] = (
                status.st_ino,
                status.st_mode,
                changed,
                directory,
            )
        return found

    def _differences(
        self,
        known: dict[str, tuple[int, int, int, bool]],
        now: dict[str, tuple[int, int, int, bool]],
    ) -> list[Change]:
        changes: list[Change] = []
        gone = {path: value for path, value in known.items() if path not in now}
        by_inode = {value[0]: path for path, value in gone.items()}
        for path, value in now.items():
            if path in known:
                if known[path] != value:
                    changes.append({"type": "modified", "path": path})
            elif value[0] in by_inode:
                old = by_inode.pop(value[0])
                del gone[old]
                changes.append({"type": "moved", "path": path, "from": old})
            else:
                changes.append({"type": "created", "path": path})
        changes += [{"type": "deleted", "path": path} for path in gone]
        if self._full and not self._cut:
            self._cut = True
            changes.append({"type": "overflow", "path": "/".join(self._above)})
        return changes
