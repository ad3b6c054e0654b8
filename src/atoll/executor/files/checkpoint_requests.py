"""
Transfers the workspace for checkpoints: the requests `scan`, `collect` and `populate`.

The work is done in short turns, within the credit of the other end, so that PID 1 is never blocked
for long. `scan` can freeze user code, so that the list of files is consistent.
"""

from __future__ import annotations

import time

from ..connection import Stream, StreamHandler
from ..event_loop import Loop
from ..freeze import MAX_HOLD, Freezer
from .checkpoint_restore import Population
from .checkpoint_scan import Scan, send_contents, send_entries
from .paths import FileError
from .workspace import Workspace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

TURN_SECONDS = 0.003


class CheckpointRequests:
    def __init__(self, loop: Loop, workspace: Workspace, freezer: Freezer) -> None:
        self._loop = loop
        self._workspace = workspace
        self._freezer = freezer

    def start(self, stream: Stream, request: dict[str, Any]) -> None:
        operations = {"scan": self._scan, "collect": self._collect, "populate": self._populate}
        operations[request["op"]](stream, request)

    def _scan(self, stream: Stream, request: dict[str, Any]) -> None:
        scan = Scan(self._workspace)
        freeze = request.get("freeze")
        if freeze:
            seconds = MAX_HOLD if freeze is True else min(float(freeze), MAX_HOLD)
            stream.handle(_FrozenScan(self._loop, stream, scan, self._freezer, seconds))
        else:
            steps = send_entries(scan, stream)
            self._run(stream, steps, lambda: {"cut": scan.cut, "frozen": False})

    def _collect(self, stream: Stream, request: dict[str, Any]) -> None:
        self._run(stream, send_contents(self._workspace, request["paths"], stream), lambda: {})

    def _run(
        self, stream: Stream, steps: Iterator[None], result: Callable[[], dict[str, Any]]
    ) -> None:
        turns = _Turns(self._loop, stream, steps, result)
        stream.handle(turns)
        turns.credited()

    def _populate(self, stream: Stream, request: dict[str, Any]) -> None:
        stream.handle(_Populating(stream, Population(self._workspace)))
        stream.grant(0)


class _Turns(StreamHandler):
    """Takes the steps of a request while there is credit, a few in each turn of the loop."""

    def __init__(
        self,
        loop: Loop,
        stream: Stream,
        steps: Iterator[None],
        result: Callable[[], dict[str, Any]],
    ) -> None:
        self._loop = loop
        self._stream = stream
        self._steps = steps
        self._result = result
        self._due = self._over = False

    def credited(self) -> None:
        if not self._due:
            self._due = True
            self._loop.after(0, self._turn)

    def dropped(self) -> None:
        self._over = True
        self._steps.close()  # type: ignore[attr-defined]

    def _turn(self) -> None:
        self._due = False
        if self._over:
            return
        deadline = time.monotonic() + TURN_SECONDS
        try:
            while self._stream.credit > 0:
                next(self._steps)
                if time.monotonic() > deadline:
                    self.credited()
                    return
        except StopIteration:
            self._over = True
            self._stream.end(self._result())
        except OSError as error:
            self.dropped()
            self._stream.error("file_error", str(error))


class _FrozenScan(_Turns):
    """A scan while user code is frozen, for at most so many seconds."""

    def __init__(
        self, loop: Loop, stream: Stream, scan: Scan, freezer: Freezer, seconds: float
    ) -> None:
        super().__init__(
            loop,
            stream,
            self._entries(scan),
            lambda: {"cut": scan.cut, "frozen": self._frozen},
        )
        self._begun = self._frozen = False
        self._hold = freezer.hold(self._ready, seconds)

    def _ready(self) -> None:
        # In a turn of its own: this may be called before `hold` has returned.
        self._loop.after(0, self._begin)

    def _begin(self) -> None:
        self._begun = True
        self.credited()

    def credited(self) -> None:
        if self._begun:
            super().credited()

    def dropped(self) -> None:
        super().dropped()
        self._end()

    def _entries(self, scan: Scan) -> Iterator[None]:
        try:
            yield from send_entries(scan, self._stream)
        finally:
            self._end()

    def _end(self) -> None:
        self._frozen = self._hold.end()


class _Populating(StreamHandler):
    def __init__(self, stream: Stream, population: Population) -> None:
        self._stream = stream
        self._population = population

    def received(self, data: bytes) -> None:
        try:
            self._population.feed(data)
        except (FileError, OSError, ValueError, TypeError) as error:
            self._population.abandon()
            code = error.code if isinstance(error, FileError) else "file_error"
            self._stream.error(code, str(error))
            return
        self._stream.grant(len(data))

    def finished(self) -> None:
        try:
            self._stream.end({"made": self._population.finish()})
        except (FileError, OSError, ValueError) as error:
            self._stream.error("file_error", str(error))

    def dropped(self) -> None:
        self._population.abandon()
