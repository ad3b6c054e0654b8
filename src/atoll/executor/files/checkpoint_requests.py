"""
Transfers the workspace for checkpoints: the requests `scan`, `collect` and `populate`.

The work is done in short turns, within the credit of the other end, so that PID 1 is never blocked
for long. `scan` can freeze user code, so that the list of files is consistent.
"""

from __future__ import annotations

import time

from ..connection import Stream
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
            self._scan_frozen(stream, scan, seconds)
        else:
            steps = send_entries(scan, stream)
            self._run_in_turns(stream, steps, lambda: {"cut": scan.cut, "frozen": False})

    def _scan_frozen(self, stream: Stream, scan: Scan, seconds: float) -> None:
        """Scan while user code is frozen, for at most so many seconds."""
        state = {"frozen": False, "over": False}

        def end() -> None:
            state["over"] = True
            state["frozen"] = hold.end()

        def steps() -> Iterator[None]:
            try:
                yield from send_entries(scan, stream)
            finally:
                end()

        def begin() -> None:
            if state["over"]:
                return
            self._run_in_turns(
                stream, steps(), lambda: {"cut": scan.cut, "frozen": state["frozen"]}
            )
            stop = stream.on_reset
            assert stop is not None

            def reset() -> None:
                stop()
                end()

            stream.on_reset = reset

        def ready(good: bool) -> None:
            # In a turn of its own: this may be called before `hold` has returned.
            self._loop.after(0, begin)

        hold = self._freezer.hold(ready, seconds)
        stream.on_reset = end

    def _collect(self, stream: Stream, request: dict[str, Any]) -> None:
        steps = send_contents(self._workspace, request["paths"], stream)
        self._run_in_turns(stream, steps, lambda: {})

    def _populate(self, stream: Stream, request: dict[str, Any]) -> None:
        population = Population(self._workspace)

        def data(payload: bytes) -> None:
            try:
                population.feed(payload)
            except (FileError, OSError, ValueError, TypeError) as error:
                population.abandon()
                code = error.code if isinstance(error, FileError) else "file_error"
                stream.error(code, str(error))
                return
            stream.grant(len(payload))

        def finish() -> None:
            try:
                stream.end({"made": population.finish()})
            except (FileError, OSError, ValueError) as error:
                stream.error("file_error", str(error))

        stream.on_data = data
        stream.on_finish = finish
        stream.on_reset = population.abandon
        stream.grant(0)

    def _run_in_turns(
        self, stream: Stream, steps: Iterator[None], result: Callable[[], dict[str, Any]]
    ) -> None:
        """Run the steps while there is credit, a few in each turn of the loop."""
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
