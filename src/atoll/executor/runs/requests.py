"""Requests about existing runs: follow, acknowledge, cancel, send input and signals."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]

from .. import processes
from ..connection import Refusal, Stream
from ..interpreter.zygote_client import ZygoteClient
from . import terminal
from .run import Run
from .runs import Runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable


class RunRequests:
    def __init__(self, runs: Runs, zygote: ZygoteClient) -> None:
        self._runs = runs
        self._zygote = zygote
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
        expected = request.get("expected") and not self._runs.is_acknowledged(run_id)
        if expected and self._runs.get(run_id) is None:
            self._runs.expect(run_id, stream, after)
        else:
            self._runs.attach(known_run(self._runs, run_id), stream, after)

    def _ack(self, stream: Stream, request: dict[str, Any]) -> None:
        self._runs.acknowledge(request["id"])
        stream.connection.close_stream(stream.number)

    def _started(self, request: dict[str, Any]) -> Run:
        """The run; raises an error unless it is active and was handed to a process."""
        run = active_run(self._runs, request["id"])
        if run.parked:
            raise _not_active(run.id)
        return run

    def _cancel(self, stream: Stream, request: dict[str, Any]) -> None:
        run = known_run(self._runs, request["id"])
        self._runs.end(run, "cancelled", float(request.get("grace", 0.0)))
        stream.end({})

    def _stdin(self, stream: Stream, request: dict[str, Any]) -> None:
        import binascii

        data = binascii.a2b_base64(request["data"])
        problem = self._started(request).pipes.write_stdin(data, bool(request.get("eof")))
        if problem is not None:
            raise Refusal(problem, "stdin of run %s accepts no data" % request["id"])
        stream.end({})

    def _resize(self, stream: Stream, request: dict[str, Any]) -> None:
        rows, columns = int(request["rows"]), int(request["cols"])
        if not 0 < rows <= terminal.MAX_SIZE or not 0 < columns <= terminal.MAX_SIZE:
            raise ValueError("a terminal has 1 to %d rows and columns" % terminal.MAX_SIZE)
        fd = self._started(request).pipes.terminal_fd
        if fd < 0:
            raise Refusal("no_terminal", "run %s has no terminal" % request["id"])
        terminal.resize(fd, rows, columns)
        stream.end({})

    def _signal(self, stream: Stream, request: dict[str, Any]) -> None:
        number = int(request["signal"])
        if not 0 < number < signal.NSIG:
            raise ValueError("%d is not a signal" % number)
        self._zygote.poll_taken()
        self._runs.send_signal(self._started(request), number)
        stream.end({})

    def _processes(self, stream: Stream, request: dict[str, Any]) -> None:
        """List the background processes of runs; kill them if the request has `kill`."""
        listed = []
        for pid, run_id in list(self._runs.table.background.items()):
            process = processes.read(pid)
            if process is None:
                continue
            if request.get("kill"):
                processes.kill_tree(pid)
            listed.append({"pid": pid, "execution_id": run_id, "name": process.name})
        stream.end({"processes": listed})


def known_run(runs: Runs, run_id: str) -> Run:
    run = runs.get(run_id)
    if run is None:
        raise Refusal("unknown_run", "no run %s is in the journal" % run_id)
    return run


def active_run(runs: Runs, run_id: str) -> Run:
    """The run; raises an error if it has ended or is being ended."""
    run = known_run(runs, run_id)
    if not run.accepts_requests:
        raise _not_active(run_id)
    return run


def _not_active(run_id: str) -> Refusal:
    return Refusal("not_running", "run %s has ended or is being ended" % run_id)
