"""
The requests about files: from the workspace to a stream and back, by the credit of either end.
"""

from __future__ import annotations

import errno
import os

from . import files, frames
from .artifacts import Scanner
from .connection import Stream
from .watch import Watch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable


class FileRequests:
    def __init__(self, workspace: files.Workspace, scanner: Scanner, watch: Watch) -> None:
        self._workspace = workspace
        self._scanner = scanner
        self._watch = watch
        self.operations: dict[str, Callable[[Stream, dict[str, Any]], None]] = {
            "read": self._read,
            "write": self._write,
            "list": self._list,
            "stat": self._stat,
            "mkdir": self._mkdir,
            "move": self._move,
            "remove": self._remove,
        }

    def _read(self, stream: Stream, request: dict[str, Any]) -> None:
        fd, status = self._workspace.open(request["path"])
        left = [status.st_size]
        stream.event({"event": "entry", "entry": files.entry(request["path"], status)})

        def pump() -> None:
            while stream.credit > 0 and left[0] > 0:
                try:
                    data = os.read(fd, min(frames.CHUNK, stream.credit, left[0]))
                except OSError as error:
                    os.close(fd)
                    stream.error("file_error", str(error))
                    return
                if not data:
                    break  # It became shorter meanwhile.
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
        room = self._watch.room()
        upload = self._workspace.upload(request["path"], int(request.get("mode", 0o644)))

        def data(payload: bytes) -> None:
            nonlocal room
            try:
                if room is not None:
                    room -= len(payload)
                    if room < 0:
                        raise files.translate(OSError(errno.ENOSPC, ""), request["path"])
                upload.write(payload)
            except files.FileError as error:
                upload.abandon()
                stream.error(error.code, str(error))
                return
            stream.grant(len(payload))

        def finish() -> None:
            try:
                entry = upload.finish()
            except files.FileError as error:
                stream.error(error.code, str(error))
                return
            self._scanner.remember(upload.path)
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
