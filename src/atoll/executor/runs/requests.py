"""The requests about runs that are there: to hear them, to talk to them, to end them."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]

from .. import processes
from ..connection import Refusal, Stream
from . import terminal
from .runs import Run, Runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable


class RunRequests:
    def __init__(self, runs: Runs, see_taken: Callable[[], None]) -> None:
        self._runs = runs
        self._see_taken = see_taken
        self.operations: dict[str, Callable[[Stream, dict[str, Any]], None]] = {
            "attach": self._attach,
            "ack": self._ack,
            "cancel": self._cancel,
            "stdin": self._stdin,
            "resize": self._resize,
            "signal": self._signal,
            "processes": self._processes,
        }

    def _attach(self, stream: Stream, request: dict[str, Any]) -> None:
        run_id, after = request["id"], int(request.get("after", 0))
        expected = request.get("expected") and not self._runs.is_over(run_id)
        if expected and self._runs.get(run_id) is None:
            self._runs.expect(run_id, stream, after)
        else:
            self._runs.attach(self._known(request), stream, after)

    def _ack(self, stream: Stream, request: dict[str, Any]) -> None:
        self._runs.acknowledge(request["id"])
        stream.connection.close_stream(stream.number)

    def _known(self, request: dict[str, Any]) -> Run:
        run = self._runs.get(request["id"])
        if run is None:
            raise Refusal("unknown_run", "no run %s is in the journal" % request["id"])
        return run

    def _active(self, request: dict[str, Any]) -> Run:
        """The run that is to hear something, which one that is over or ends cannot."""
        run = self._known(request)
        if run.over or run.reason is not None or run.parked:
            raise Refusal("not_running", "run %s does not run" % run.id)
        return run

    def _cancel(self, stream: Stream, request: dict[str, Any]) -> None:
        self._runs.end(self._known(request), "cancelled", float(request.get("grace", 0.0)))
        stream.end({})

    def _stdin(self, stream: Stream, request: dict[str, Any]) -> None:
        import binascii

        data = binascii.a2b_base64(request["data"])
        trouble = self._active(request).pipes.give(data, bool(request.get("eof")))
        if trouble is not None:
            raise Refusal(trouble, "stdin of run %s takes nothing" % request["id"])
        stream.end({})

    def _resize(self, stream: Stream, request: dict[str, Any]) -> None:
        rows, columns = int(request["rows"]), int(request["cols"])
        if not 0 < rows <= terminal.MAX_SIZE or not 0 < columns <= terminal.MAX_SIZE:
            raise ValueError("a terminal has 1 to %d rows and columns" % terminal.MAX_SIZE)
        keyboard = self._active(request).pipes.terminal_fd
        if keyboard < 0:
            raise Refusal("no_terminal", "run %s has no terminal" % request["id"])
        terminal.resize(keyboard, rows, columns)
        stream.end({})

    def _signal(self, stream: Stream, request: dict[str, Any]) -> None:
        number = int(request["signal"])
        if not 0 < number < signal.NSIG:
            raise ValueError("%d is no signal" % number)
        self._see_taken()
        self._runs.send_signal(self._active(request), number)
        stream.end({})

    def _processes(self, stream: Stream, request: dict[str, Any]) -> None:
        """What executions left running; with `kill`, its end."""
        listed = []
        for pid, run_id in list(self._runs.background.items()):
            process = processes.read(pid)
            if process is None:
                continue
            if request.get("kill"):
                processes.kill_tree(pid)
            listed.append({"pid": pid, "execution_id": run_id, "name": process.name})
        stream.end({"processes": listed})
