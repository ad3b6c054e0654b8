"""
Requests about files: read, write, list, search, archives, changes.

Short requests are served in the loop of PID 1, long ones by a worker process.
"""

from __future__ import annotations

import errno
import os

from ...protocol import frames
from .. import syscalls
from ..connection import Stream
from ..runs.limit_enforcement import LimitWatch
from ..workers import Workers, WorkerStream
from .artifacts import ArtifactScanner
from .entries import entry_of
from .paths import FileError, translate
from .upload import Condition
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
        left = [0 if request.get("head") or start is None else stop - start]
        if start and left[0]:
            os.lseek(fd, start, os.SEEK_SET)

        def pump() -> None:
            while stream.credit > 0 and left[0] > 0:
                try:
                    data = os.read(fd, min(frames.CHUNK, stream.credit, left[0]))
                except OSError as error:
                    os.close(fd)
                    stream.error("file_error", str(error))
                    return
                if not data:
                    break  # The file has become shorter.
                left[0] -= len(data)
                stream.send(frames.DATA, data)
            else:
                if left[0] > 0:
                    return  # More credit will come.
            os.close(fd)
            stream.end({"short": left[0]})

        stream.on_credit = pump
        stream.on_reset = lambda: os.close(fd)
        pump()

    def _write(self, stream: Stream, request: dict[str, Any]) -> None:
        room = self._limits.room(request.get("disk"))
        condition = Condition(request.get("if_match"), request.get("if_none_match"))
        mode = int(request.get("mode", 0o644))
        upload = self._workspace.upload(request["path"], mode, condition)

        def data(payload: bytes) -> None:
            nonlocal room
            try:
                if room is not None:
                    room -= len(payload)
                    if room < 0:
                        raise translate(OSError(errno.ENOSPC, ""), request["path"])
                upload.write(payload)
            except FileError as error:
                upload.abandon()
                stream.error(error.code, str(error))
                return
            stream.grant(len(payload))

        def finish() -> None:
            try:
                entry = upload.finish()
            except FileError as error:
                stream.error(error.code, str(error))
                return
            self._scanner.remember(upload.path)
            self._on_change()
            stream.end({"entry": entry})

        stream.on_data = data
        stream.on_finish = finish
        stream.on_reset = upload.abandon
        stream.grant(0)

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
