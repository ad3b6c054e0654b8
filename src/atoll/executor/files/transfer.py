"""
The workspace as a whole: told, carried out and carried in, for checkpoints.

`scan` tells every file, directory and link in the order of their paths, component by component, and
on request lets user code stand still meanwhile, so that the list is of one moment.
`collect` sends the contents of many files in one stream, with holes as holes. `populate` takes the
same the other way, into a workspace that nobody uses yet; directories get their modes and times at
its end, so that one that may not be written to can be filled.

All of it is done in short turns, by the credit of the other end: PID 1 is never away for long. User
code that does not stand still may change everything meanwhile. It can spoil the copy of its own
files by that and nothing else: nothing is followed out of the workspace, and a file that changes
while it is read is told as changed.
"""

from __future__ import annotations

import errno
import os
import stat
import time

from ...protocol import frames, minijson
from ..connection import Stream
from ..event_loop import Loop
from ..freeze import HOLD_SECONDS, Standstill
from . import permissions, removal
from .artifacts import coarse_now
from .paths import STAGING, UPLOAD, FileError, open_below, split, translate
from .workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

TURN_SECONDS = 0.003
BATCH = 32 * 1024
"""Bytes of told entries that travel together."""
MAX_DEPTH = 200
"""Each level has a descriptor while it is walked."""
MAX_NAMES = 250_000
"""Of one directory; they are sorted in memory."""
MAX_PATH = 16 * 1024
"""Characters; each is up to six bytes where it is told."""
MAX_HEADER = 256 * 1024
FILE, DIRECTORY, LINK = "f", "d", "l"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Porter:
    def __init__(self, loop: Loop, workspace: Workspace, standstill: Standstill) -> None:
        self._loop = loop
        self._workspace = workspace
        self._standstill = standstill

    def scan(self, stream: Stream, request: dict[str, Any]) -> None:
        walk = Walk(self._workspace)
        freeze = request.get("freeze")
        if freeze:
            seconds = HOLD_SECONDS if freeze is True else min(float(freeze), HOLD_SECONDS)
            self._scan_still(stream, walk, seconds)
        else:
            self._turns(stream, _told(walk, stream), lambda: {"cut": walk.cut, "frozen": False})

    def _scan_still(self, stream: Stream, walk: Walk, seconds: float) -> None:
        """The same while user code stands still, for as long as that may be asked of it."""
        state = {"frozen": False, "over": False}

        def end() -> None:
            state["over"] = True
            state["frozen"] = hold.end()

        def steps() -> Iterator[None]:
            try:
                yield from _told(walk, stream)
            finally:
                end()

        def begin() -> None:
            if state["over"]:
                return
            self._turns(stream, steps(), lambda: {"cut": walk.cut, "frozen": state["frozen"]})
            stop = stream.on_reset
            assert stop is not None

            def reset() -> None:
                stop()
                end()

            stream.on_reset = reset

        def ready(good: bool) -> None:
            # In a turn of its own: all may stand still already.
            self._loop.after(0, begin)

        hold = self._standstill.hold(ready, seconds)
        stream.on_reset = end

    def collect(self, stream: Stream, request: dict[str, Any]) -> None:
        self._turns(stream, _contents(self._workspace, request["paths"], stream), lambda: {})

    def populate(self, stream: Stream, request: dict[str, Any]) -> None:
        arrival = Arrival(self._workspace)

        def data(payload: bytes) -> None:
            try:
                arrival.feed(payload)
            except (FileError, OSError, ValueError, TypeError) as error:
                arrival.abandon()
                code = error.code if isinstance(error, FileError) else "file_error"
                stream.error(code, str(error))
                return
            stream.grant(len(payload))

        def finish() -> None:
            try:
                stream.end({"made": arrival.finish()})
            except (FileError, OSError, ValueError) as error:
                stream.error("file_error", str(error))

        stream.on_data = data
        stream.on_finish = finish
        stream.on_reset = arrival.abandon
        stream.grant(0)

    def _turns(
        self, stream: Stream, steps: Iterator[None], result: Callable[[], dict[str, Any]]
    ) -> None:
        """Take the steps while there is credit, a few at a time."""
        state = {"due": False, "over": False}

        def turn() -> None:
            state["due"] = False
            if state["over"]:
                return
            deadline = time.monotonic() + TURN_SECONDS
            try:
                while stream.credit > 0:
                    next(steps)
                    if time.monotonic() > deadline:
                        again()
                        return
            except StopIteration:
                state["over"] = True
                stream.end(result())
            except OSError as error:
                stop()
                stream.error("file_error", str(error))

        def again() -> None:
            if not state["due"]:
                state["due"] = True
                self._loop.after(0, turn)

        def stop() -> None:
            state["over"] = True
            steps.close()  # type: ignore[attr-defined]

        stream.on_credit = again
        stream.on_reset = stop
        again()


class Walk:
    """Every entry of the workspace, in order; `cut` when some were left out."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self.cut = False

    def entries(self) -> Iterator[list[Any] | None]:
        """One at a time; None where a step took time and gave nothing."""
        stack: list[tuple[int, int, str, list[str]]] = []
        try:
            top = os.dup(self._workspace.root)
            stack.append((top, -1, "", self._names(top, top=True)))
            while stack:
                fd, mode, prefix, names = stack[-1]
                if not names:
                    stack.pop()
                    permissions.close(fd, mode)
                    yield None
                    continue
                name = names.pop()
                path = prefix + name
                try:
                    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    entry = _entry(path, status)
                    if stat.S_ISLNK(status.st_mode):
                        entry.append(os.readlink(name, dir_fd=fd))
                except OSError:
                    yield None  # Gone since it was listed.
                    continue
                if entry[1] == "":
                    yield None  # A pipe, a socket: it has no content to keep.
                    continue
                if len(path) > MAX_PATH:
                    # User code that goes down step by step can make paths of any length.
                    self.cut = True
                    yield None
                    continue
                yield entry
                if entry[1] == DIRECTORY:
                    below, mode = self._below(fd, name, len(stack))
                    if below >= 0:
                        stack.append((below, mode, path + "/", self._names(below)))
        finally:
            for fd, mode, _, _ in reversed(stack):
                permissions.close(fd, mode)

    def _below(self, fd: int, name: str, depth: int) -> tuple[int, int]:
        """A directory, opened, and the rights to give back to it; -1 when it cannot be entered."""
        if depth >= MAX_DEPTH:
            self.cut = True
            return -1, -1
        try:
            return permissions.open_directory(name, fd)
        except OSError:
            self.cut = True
            return -1, -1

    def _names(self, fd: int, top: bool = False) -> list[str]:
        """The last one first."""
        names: list[str] = []
        with os.scandir(fd) as items:
            for item in items:
                if len(names) >= MAX_NAMES:
                    self.cut = True
                    break
                if not item.name.startswith((removal.TRASH, UPLOAD)) and not (
                    top and item.name == STAGING
                ):
                    names.append(item.name)
        names.sort(reverse=True)
        return names


def _entry(path: str, status: os.stat_result) -> list[Any]:
    mode = status.st_mode
    kind = (
        FILE
        if stat.S_ISREG(mode)
        else DIRECTORY
        if stat.S_ISDIR(mode)
        else LINK
        if stat.S_ISLNK(mode)
        else ""
    )
    size = status.st_size if kind == FILE else 0
    return [
        path, kind, stat.S_IMODE(mode), size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino,
    ]  # fmt: skip


def _told(walk: Walk, stream: Stream) -> Iterator[None]:
    lines: list[bytes] = []
    size = 0
    for entry in walk.entries():
        if entry is not None:
            line = minijson.dumps(entry)
            lines.append(line)
            size += len(line)
        if size >= BATCH:
            stream.send(frames.DATA, b"\n".join(lines) + b"\n")
            lines, size = [], 0
        yield
    if lines:
        stream.send(frames.DATA, b"\n".join(lines) + b"\n")


def _contents(workspace: Workspace, paths: list[str], stream: Stream) -> Iterator[None]:
    """
    Of each file: an event that it begins, its bytes, events for its holes, an event that it ends.
    """
    for index, path in enumerate(paths):
        try:
            fd = permissions.open_file(workspace.root, path)
        except FileError as error:
            stream.event({"event": "gone", "index": index, "why": error.code})
            yield
            continue
        try:
            status = os.fstat(fd)
            now = coarse_now()
            while status.st_ctime_ns >= now == coarse_now():
                yield  # Read now, it could change once more and keep its time.
            stream.event({"event": "file", "index": index, "entry": _entry(path, status)})
            yield
            left = status.st_size
            for offset, length in _extents(fd, left):
                if offset is None:
                    stream.event({"event": "hole", "length": length})
                    continue
                end = offset + length
                while offset < end:
                    data = os.pread(fd, min(frames.CHUNK, end - offset), offset)
                    if not data:
                        break  # It became shorter; the end tells that it changed.
                    offset += len(data)
                    stream.send(frames.DATA, data)
                    yield
            after = os.fstat(fd)
            same = (after.st_size, after.st_ctime_ns) == (status.st_size, status.st_ctime_ns)
            stream.event({"event": "over", "index": index, "same": same})
            yield
        finally:
            os.close(fd)


def _extents(fd: int, size: int) -> Iterator[tuple[int | None, int]]:
    """Where there is data and how much, and between them the lengths of holes with no place."""
    offset = 0
    while offset < size:
        try:
            start = min(os.lseek(fd, offset, os.SEEK_DATA), size)
        except OSError as error:
            # Else it is not known on this file system: all is data.
            start = size if error.errno == errno.ENXIO else offset
        if start > offset:
            yield None, start - offset
            offset = start
            continue
        try:
            end = min(os.lseek(fd, offset, os.SEEK_HOLE), size)
        except OSError:
            end = size
        if end <= offset:
            end = size
        yield offset, end - offset
        offset = end


class Arrival:
    """
    Entries on their way in: for each a length, JSON, and for files their extents.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._buffer = bytearray()
        self._file = -1
        self._entry: list[Any] = []
        self._place = self._left = 0
        """Of the extent that comes: where it goes on, and how many bytes."""
        self._directories: list[list[Any]] = []
        self._made = 0

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while self._take():
            pass

    def _take(self) -> bool:
        """Whether there may be more to take."""
        buffer = self._buffer
        if self._left:
            piece = bytes(buffer[: self._left])
            if not piece:
                return False
            del buffer[: len(piece)]
            self._left -= len(piece)
            while piece:
                written = os.pwrite(self._file, piece, self._place)
                self._place += written
                piece = piece[written:]
            return True
        if self._file >= 0:
            if len(buffer) < frames.EXTENT.size:
                return False
            self._place, self._left = frames.EXTENT.unpack(bytes(buffer[: frames.EXTENT.size]))
            del buffer[: frames.EXTENT.size]
            if not self._left:
                self._close()
            return True
        if len(buffer) < 4:
            return False
        size = int.from_bytes(buffer[:4], "big")
        if size > MAX_HEADER:
            raise ValueError("an entry of %d bytes" % size)
        if len(buffer) < 4 + size:
            return False
        entry = minijson.loads(bytes(buffer[4 : 4 + size]))
        del buffer[: 4 + size]
        self._begin(entry)
        return True

    def _begin(self, entry: list[Any]) -> None:
        path, kind, mode, size, modified, more = entry
        self._made += 1
        try:
            parent, name = self._workspace.reach_parent(path, make=True)
            try:
                if kind == DIRECTORY:
                    try:
                        os.mkdir(name, 0o700, dir_fd=parent)
                    except FileExistsError:
                        pass  # Made by another stream, for what is in it.
                    self._directories.append([path, mode, modified])
                elif kind == LINK:
                    os.symlink(more, name, dir_fd=parent)
                    os.utime(name, ns=(modified, modified), dir_fd=parent, follow_symlinks=False)
                else:
                    self._file = os.open(name, _NEW, 0o600, dir_fd=parent)
                    os.ftruncate(self._file, size)
                    self._entry = entry
            finally:
                os.close(parent)
        except OSError as error:
            raise translate(error, path) from None

    def _close(self) -> None:
        fd, self._file = self._file, -1
        try:
            os.fchmod(fd, self._entry[2])
            os.utime(fd, ns=(self._entry[4], self._entry[4]))
        finally:
            os.close(fd)

    def finish(self) -> int:
        if self._file >= 0 or self._buffer:
            self.abandon()
            raise ValueError("the entries end in the middle of one")
        # The deepest first: what is above may be closed to us afterwards.
        for path, mode, modified in reversed(self._directories):
            fd = open_below(self._workspace.root, split(path))
            try:
                os.utime(fd, ns=(modified, modified))
                os.fchmod(fd, mode)
            finally:
                os.close(fd)
        return self._made

    def abandon(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
