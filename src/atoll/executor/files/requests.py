"""
Requests about files: read, write, list, search, archives, changes.

Short requests are served in the loop of PID 1, long ones by a worker process.
"""

from __future__ import annotations

import errno
import os

from ...protocol import frames
from .. import syscalls
from ..connection import Stream, StreamHandler
from ..runs.limit_enforcement import LimitWatch
from ..workers import Workers, WorkerStream
from .artifacts import ArtifactScanner
from .entries import entry_of
from .paths import FileError, translate
from .upload import Condition, Upload
from .workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable


class FileRequests:
    def __init__(
        self,
        workspace: Workspace,
        scanner: ArtifactScanner,
        limits: LimitWatch,
        workers: Workers,
        on_change: Callable[[], None],
    ) -> None:
        self._workspace = workspace
        self._scanner = scanner
        self._limits = limits
        self._workers = workers
        self._on_change = on_change
        """Called when an upload is complete, some time after its request."""
        self.operations: dict[str, Callable[[Stream, dict[str, Any]], None]] = {
            "read": self._read,
            "write": self._write,
            "list": self._list,
            "stat": self._stat,
            "mkdir": self._mkdir,
            "move": self._move,
            "remove": self._remove,
            "chmod": self._chmod,
            "tree": self._tree,
            "search": self._search,
            "pack": self._pack,
            "unpack": self._unpack,
            "copy": self._copy,
            "follow": self._follow,
            "sync": self._sync,
        }

    def _read(self, stream: Stream, request: dict[str, Any]) -> None:
        fd, status = self._workspace.open(request["path"])
        entry = entry_of(request["path"], status)
        start, stop = _range(request, entry)
        entry["start"], entry["stop"] = start, stop
        stream.event({"event": "entry", "entry": entry})
        size = 0 if request.get("head") or start is None else stop - start
        if start and size:
            os.lseek(fd, start, os.SEEK_SET)
        reading = _Reading(stream, fd, size)
        stream.handle(reading)
        reading.credited()

    def _write(self, stream: Stream, request: dict[str, Any]) -> None:
        room = self._limits.room(request.get("disk"))
        condition = Condition(request.get("if_match"), request.get("if_none_match"))
        mode = int(request.get("mode", 0o644))
        upload = self._workspace.upload(request["path"], mode, condition)
        stream.handle(_Writing(stream, upload, room, self._written))
        stream.grant(0)

    def _written(self, path: str) -> None:
        self._scanner.remember(path)
        self._on_change()

    def _list(self, stream: Stream, request: dict[str, Any]) -> None:
        limit = min(int(request["limit"]), 1000)
        stream.end(self._workspace.list(request["path"], request.get("after") or "", limit))

    def _stat(self, stream: Stream, request: dict[str, Any]) -> None:
        stream.end({"entry": self._workspace.stat(request["path"])})

    def _mkdir(self, stream: Stream, request: dict[str, Any]) -> None:
        stream.end({"entry": self._workspace.mkdir(request["path"], bool(request["parents"]))})

    def _move(self, stream: Stream, request: dict[str, Any]) -> None:
        source, target = request["source"], request["target"]
        entry = self._workspace.move(source, target, bool(request["overwrite"]))
        self._scanner.remember(entry["path"])
        stream.end({"entry": entry})

    def _remove(self, stream: Stream, request: dict[str, Any]) -> None:
        self._workspace.remove(request["path"], bool(request["recursive"]))
        stream.end({})

    def _chmod(self, stream: Stream, request: dict[str, Any]) -> None:
        entry = self._workspace.chmod(request["path"], int(request["mode"]))
        self._scanner.remember(entry["path"])
        stream.end({"entry": entry})

    # By a worker, which imports what it needs

    def _tree(self, stream: Stream, request: dict[str, Any]) -> None:
        def work(stream: WorkerStream) -> Any:
            from .search import list_tree

            return list_tree(self._workspace, request)

        self._workers.start(stream, work)

    def _search(self, stream: Stream, request: dict[str, Any]) -> None:
        def work(stream: WorkerStream) -> Any:
            from .search import search

            return search(self._workspace, request)

        self._workers.start(stream, work)

    def _pack(self, stream: Stream, request: dict[str, Any]) -> None:
        def work(stream: WorkerStream) -> Any:
            from .pack import pack

            return pack(self._workspace, request, stream)

        self._workers.start(stream, work)

    def _unpack(self, stream: Stream, request: dict[str, Any]) -> None:
        room = self._limits.room(request.get("disk"))

        def work(stream: WorkerStream) -> Any:
            from .unpack import unpack

            return unpack(self._workspace, request, stream, room)

        self._workers.start(stream, work)

    def _copy(self, stream: Stream, request: dict[str, Any]) -> None:
        room = self._limits.room(request.get("disk"))

        def work(stream: WorkerStream) -> Any:
            from .copy import copy

            return copy(self._workspace, request, room)

        self._workers.start(stream, work)

    def _follow(self, stream: Stream, request: dict[str, Any]) -> None:
        def work(stream: WorkerStream) -> Any:
            from .watch import follow

            return follow(self._workspace, request, stream)

        self._workers.start(stream, work, "watch")

    def _sync(self, stream: Stream, request: dict[str, Any]) -> None:
        def work(stream: WorkerStream) -> Any:
            syscalls.sync_files(self._workspace.root)
            return {}

        self._workers.start(stream, work)


class _Reading(StreamHandler):
    """Sends the next `left` bytes of a file, within the stream's credit."""

    def __init__(self, stream: Stream, fd: int, left: int) -> None:
        self._stream = stream
        self._fd = fd
        self._left = left

    def credited(self) -> None:
        stream = self._stream
        while stream.credit > 0 and self._left > 0:
            try:
                data = os.read(self._fd, min(frames.CHUNK, stream.credit, self._left))
            except OSError as error:
                os.close(self._fd)
                stream.error("file_error", str(error))
                return
            if not data:
                break  # The file has become shorter.
            self._left -= len(data)
            stream.send(frames.DATA, data)
        else:
            if self._left > 0:
                return  # More credit will come.
        os.close(self._fd)
        stream.end({"short": self._left})

    def dropped(self) -> None:
        os.close(self._fd)


class _Writing(StreamHandler):
    """Receives an upload, of at most `room` bytes."""

    def __init__(
        self, stream: Stream, upload: Upload, room: int | None, written: Callable[[str], None]
    ) -> None:
        self._stream = stream
        self._upload = upload
        self._room = room
        self._written = written

    def received(self, data: bytes) -> None:
        try:
            if self._room is not None:
                self._room -= len(data)
                if self._room < 0:
                    raise translate(OSError(errno.ENOSPC, ""), self._upload.path)
            self._upload.write(data)
        except FileError as error:
            self._upload.abandon()
            self._stream.error(error.code, str(error))
            return
        self._stream.grant(len(data))

    def finished(self) -> None:
        try:
            entry = self._upload.finish()
        except FileError as error:
            self._stream.error(error.code, str(error))
            return
        self._written(self._upload.path)
        self._stream.end({"entry": entry})

    def dropped(self) -> None:
        self._upload.abandon()


def _range(request: dict[str, Any], entry: dict[str, Any]) -> tuple[int | None, int]:
    """
    Start and end of the requested bytes; the start is None if the range holds no byte of the file.
    `range` is the first and the last byte. Without a first it is that many bytes from the end, and
    without a last it goes to the end.
    """
    size = entry["size"]
    wanted = request.get("range")
    if wanted is None or request.get("if_range") not in (None, entry["etag"]):
        return 0, size
    first, last = wanted
    if first is None:
        first, last = max(0, size - last), None if last else -1
    stop = size if last is None else min(size, last + 1)
    return (first, stop) if first < stop else (None, 0)
