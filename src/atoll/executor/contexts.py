"""
Contexts: processes that keep their state between runs, as the supervisor sees them.

A context has one process at a time, a fork of the zygote, which executes one run at a time.
Contexts exist only in the executor and end with it. User code may write anything to a process's
socket: it can end its own run early or show something, and nothing else. A process that closes the
socket or sends an invalid message is killed. A context whose process has exited is dead until it is
restarted; a process outlives the zygote that forked it.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import os

from ..protocol import frames, minijson
from . import processes
from .connection import Refusal, Stream
from .context import Context, ContextProcess
from .event_loop import READ, Loop, receive
from .interpreter import jobs
from .interpreter.child import FAILURE
from .interpreter.context_messages import (
    DONE,
    DONE_BODY,
    DROPPED,
    MAX_MESSAGE,
    PIECE,
    READY,
    SHOW,
    SIZE,
)
from .interpreter.zygote_client import ZygoteClient, ZygoteObserver
from .runs.run import NO_USAGE, Run
from .runs.runs import TAKEN_CHECK_INTERVAL, Runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

LANGUAGES = ("python",)
START_TIMEOUT = 25.0
RETRY_DELAY = 0.05
TIMEOUT_GRACE = 2.0
"""Seconds between SIGINT and the end of a context whose run timed out."""
MAX_READS = 64
"""Messages that are read from one process in a turn, so that others do not wait."""
DISPLAY_COST = 256
"""Added to the size of each display, so that many small ones are limited too."""


class Contexts(ZygoteObserver):
    def __init__(
        self,
        loop: Loop,
        runs: Runs,
        zygote: ZygoteClient,
        limit: Callable[[dict[str, int]], None],
    ) -> None:
        self._loop = loop
        self._runs = runs
        self._zygote = zygote
        self._limit = limit
        """Sets the limits that the executor enforces while contexts exist."""
        self._contexts: dict[str, Context] = {}
        self._processes: dict[int, ContextProcess] = {}
        """By job number."""
        self._abandoned: set[int] = set()
        """
        Jobs that timed out before a process took them. A process that takes one later is killed.
        """
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self.operations: dict[str, Callable[[Stream, dict[str, Any]], None]] = {
            "context_create": self._create,
            "context_list": self._list,
            "context_restart": self._restart,
            "context_interrupt": self._interrupt,
            "context_delete": self._delete,
        }

    # Requests

    def _create(self, stream: Stream, request: dict[str, Any]) -> None:
        if request["language"] not in LANGUAGES:
            message = "Contexts are not available for %s, only for %s."
            raise Refusal(
                "language_unsupported", message % (request["language"], ", ".join(LANGUAGES))
            )
        context = self._contexts.get(request["id"])
        if context is None:
            if len(self._contexts) >= request["most"]:
                message = "The session has %d contexts; delete one." % len(self._contexts)
                raise Refusal("too_many_contexts", message)
            context = self._contexts[request["id"]] = Context(request)
            self._limit(request.get("watch", {}))
            self._start(context)
        self._answer(context, stream)

    def _list(self, stream: Stream, request: dict[str, Any]) -> None:
        stream.end({"contexts": [context.describe() for context in self._contexts.values()]})

    def _restart(self, stream: Stream, request: dict[str, Any]) -> None:
        context = self._get(request["id"])

        def start() -> None:
            if context.process is None:
                self._start(context)
            self._answer(context, stream)

        if context.process is not None and not context.process.ready:
            self._answer(context, stream)
        else:
            self._end(context, start)

    def _interrupt(self, stream: Stream, request: dict[str, Any]) -> None:
        context = self._get(request["id"])
        if context.run is not None and context.process is not None:
            context.process.interrupt()
        stream.end({"context": context.describe()})

    def _delete(self, stream: Stream, request: dict[str, Any]) -> None:
        context = self._get(request["id"])

        def delete() -> None:
            if self._contexts.get(context.id) is context:
                del self._contexts[context.id]
            stream.end({})

        self._end(context, delete)

    def _get(self, context_id: str) -> Context:
        context = self._contexts.get(context_id)
        if context is None:
            raise Refusal("context_not_found", "Context %s does not exist." % context_id)
        return context

    def _answer(self, context: Context, stream: Stream) -> None:
        """Describe the context, once its process is ready."""
        if context.process is None or context.process.ready:
            stream.end({"context": context.describe()})
        else:
            context.waiting.append(stream)

    def _end(self, context: Context, then: Callable[[], None]) -> None:
        """End the context's process and the run in it."""
        if context.process is None:
            then()
            return
        context.on_exit.append(then)
        if context.run is not None:
            self._runs.end(context.run, "cancelled", 0.0)
        self._kill(context.process)

    # Processes

    def _start(self, context: Context) -> None:
        number = self._runs.next_job_number()
        process = context.process = self._processes[number] = ContextProcess(context, number)
        context.execution_count = 0
        context.start_timer = self._loop.after(START_TIMEOUT, lambda: self._give_up(process))
        self._hand_over(process)

    def _hand_over(self, process: ContextProcess) -> None:
        request = process.context.request
        job = {"kind": "context", "id": request["id"], "code": ""}
        for name in ("env", "cwd", "limits"):
            job[name] = request[name]
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        # If no zygote takes jobs now, `jobs_accepted` tries again.
        sent = self._zygote.accepts_jobs
        try:
            if sent:
                descriptors = [self._null] * 3 + [theirs.fileno()]
                self._zygote.send_job(process.job_number, job, descriptors)
        except OSError:
            sent = False
            self._loop.after(RETRY_DELAY, self.jobs_accepted)
        theirs.close()
        if not sent:
            ours.close()
            return
        ours.setblocking(False)
        process.socket, process.handed_over = ours, True
        self._loop.add(ours.fileno(), READ, lambda mask: self._read(process))
        self._zygote.adjust_children()
        self._watch_untaken(process, ours)

    def _watch_untaken(self, process: ContextProcess, socket: _socket.socket) -> None:
        """
        Until a child of the zygote takes the job, replace children that user code has stopped.
        """

        def check() -> None:
            children = self._zygote.children()
            # After reading their states: a stopped child has announced by now what it received.
            self._zygote.poll_taken()
            if process.socket is socket and not process.pid:
                self._runs.table.kill_stopped_spares(children)
                self._loop.after(TAKEN_CHECK_INTERVAL, check)

        self._loop.after(TAKEN_CHECK_INTERVAL, check)

    def jobs_accepted(self) -> None:
        for process in list(self._processes.values()):
            if not process.handed_over:
                self._hand_over(process)

    def children_wanted(self) -> int:
        return sum(process.zygote in (0, self._zygote.pid) for process in self._processes.values())

    def job_taken(self, number: int, pid: int) -> bool:
        process = self._processes.get(number)
        if process is None:
            if number in self._abandoned:
                self._abandoned.discard(number)
                processes.kill_tree(pid)
                return True
            return False
        process.pid, process.zygote = pid, self._zygote.pid
        self._runs.table.contexts[pid] = None
        if process.ending:
            processes.kill_tree(pid)
        return True

    def zygote_lost(self) -> None:
        # Processes that it forked are now children of PID 1 and continue to run.
        self._abandoned.clear()
        for process in list(self._processes.values()):
            if not process.pid:
                self._close(process)
                process.handed_over = False
                if process.ending:
                    self._exited(process, signal.SIGKILL, dict(NO_USAGE))
            elif processes.read(process.pid) is None:
                # The zygote reaped it and died before it could report that.
                self._exited(process, signal.SIGKILL, dict(NO_USAGE))

    def child_exited(self, pid: int, status: int, usage: dict[str, float]) -> None:
        for process in list(self._processes.values()):
            if process.pid == pid:
                self._exited(process, status, usage)

    def _exited(self, process: ContextProcess, status: int, usage: dict[str, float]) -> None:
        process.ending = process.exited = True
        # Read what it sent before it exited, in particular that its run is done.
        self._read(process)
        self._close(process)
        self._processes.pop(process.job_number, None)
        self._runs.table.contexts.pop(process.pid, None)
        context = process.context
        context.process = None
        if context.start_timer is not None:
            context.start_timer.cancel()
        self._runs.table.kill_strays()
        if context.run is not None:
            # The kernel reports the usage since the process started.
            cpu = max(0.0, usage["cpu"] - context.usage_before[0])
            self._conclude(context, process, status, dict(usage, cpu=cpu))
        waiting, context.waiting = context.waiting, []
        if not context.was_ready:
            self._contexts.pop(context.id, None)
        for stream in waiting:
            stream.error(*(process.problem or ("context_failed", "The context did not start.")))
        callbacks, context.on_exit = context.on_exit, []
        for call in callbacks:
            call()
        self._zygote.adjust_children()

    def _give_up(self, process: ContextProcess) -> None:
        """End a process that did not become ready in time."""
        self._zygote.poll_taken()
        if process.context.process is process and not process.ready:
            message = "The context did not start within %d seconds." % START_TIMEOUT
            process.problem = ("context_failed", message)
            self._kill(process)
            if not process.pid and process.context.process is process:
                self._abandoned.add(process.job_number)
                self._exited(process, signal.SIGKILL, dict(NO_USAGE))

    def _kill(self, process: ContextProcess) -> None:
        process.ending = True
        if process.pid:
            processes.kill_tree(process.pid)
        elif not process.handed_over:
            self._exited(process, signal.SIGKILL, dict(NO_USAGE))

    def _close(self, process: ContextProcess) -> None:
        if process.socket is not None:
            self._loop.remove(process.socket.fileno())
            process.socket.close()
            process.socket = None

    # Runs

    def check(self, context_id: str) -> Context:
        """The context that a run request names; it must be idle."""
        context = self._get(context_id)
        if context.state == "dead":
            raise Refusal("context_dead", "Context %s has ended; restart it." % context_id)
        if context.state == "busy":
            raise Refusal("context_busy", "Context %s is running something." % context_id)
        return context

    def begin(self, context: Context, run: Run) -> None:
        process, request = context.process, run.request
        assert process is not None
        assert process.socket is not None
        job = {"code": request["code"], "env": self._runs.variables(run)}
        job["results_limit"] = context.display_room = int(request["results_limit"])
        descriptors = self._runs.open(run)
        try:
            jobs.send(process.socket, run.job_number, job, descriptors)
        except OSError as error:
            self._runs.park(run)
            # The process does not read its jobs, or has exited.
            self._kill(process)
            message = "Context %s cannot be reached: %s." % (context.id, error)
            raise Refusal("context_dead", message) from None
        finally:
            for fd in descriptors:
                os.close(fd)
        context.run, context.reported_drop = run, False
        self._runs.table.contexts[process.pid] = run
        context.execution_count += 1
        context.usage_before = process.usage()
        run.pid = process.pid
        run.pipes.taken()
        run.run_in_context(lambda reason, grace: self._stop(process, run, reason, grace))
        self._runs.begin(run)

    def _stop(self, process: ContextProcess, run: Run, reason: str, grace: float) -> None:
        if reason == "timeout":
            grace = TIMEOUT_GRACE
        elif reason != "cancelled":
            grace = 0.0

        def kill() -> None:
            if process.context.run is run:
                self._kill(process)

        if grace <= 0:
            kill()
            return
        process.interrupt()
        run.kill_timer = self._loop.after(grace, kill)

    def _done(self, context: Context, process: ContextProcess, exit_code: int) -> None:
        """The process has finished its run and waits for the next one."""
        cpu, peak = process.usage()
        used = dict(NO_USAGE, cpu=max(0.0, cpu - context.usage_before[0]), peak=peak)
        self._conclude(context, process, exit_code << 8, used)

    def _conclude(
        self, context: Context, process: ContextProcess, status: int, usage: dict[str, float]
    ) -> None:
        run, context.run = context.run, None
        if context.process is not None:
            self._runs.table.contexts[process.pid] = None
        if run is not None:
            self._runs.conclude(run, status, usage)

    # Messages from a process

    def _read(self, process: ContextProcess) -> None:
        reads = 0
        while process.socket is not None and reads < MAX_READS and self._receive(process):
            reads += 1

    def _receive(self, process: ContextProcess) -> bool:
        """Read one message; returns whether there may be more."""
        assert process.socket is not None
        # Ancillary data, such as descriptors, is discarded.
        message = receive(process.socket, MAX_MESSAGE)
        if message is None:
            return False
        try:
            if not message:
                raise ValueError
            self._handle(process, message[:1], message[1:])
        except (ValueError, RecursionError, frames.ProtocolError):
            self._close(process)
            if process.exited:
                return False
            self._zygote.poll_taken()
            if process.pid:
                self._kill(process)
            elif process.ending:
                self._exited(process, signal.SIGKILL, dict(NO_USAGE))
            else:
                # A process received the job and never announced it, so the context has not begun.
                process.handed_over = False
                self._hand_over(process)
            return False
        return True

    def _handle(self, process: ContextProcess, kind: bytes, body: bytes) -> None:
        """Raises ValueError for an invalid message."""
        context, run = process.context, process.context.run
        if kind == READY and not process.ready:
            self._zygote.poll_taken()
            if not process.pid:
                raise ValueError
            process.ready = context.was_ready = True
            if context.start_timer is not None:
                context.start_timer.cancel()
            waiting, context.waiting = context.waiting, []
            for stream in waiting:
                self._answer(context, stream)
        elif kind == FAILURE and not process.ready:
            failure = frames.decode_json(body) if len(body) < MAX_MESSAGE else {}
            process.problem = ("bad_cwd", str(failure.get("message"))[:1000])
        elif kind == PIECE:
            self._add_piece(context, process, body)
        elif kind in (SHOW, DROPPED):
            number, size = _unpack(SIZE, body)
            process.display, process.display_size = None, 0
            if run is None or number != run.job_number:
                return  # From a thread that an earlier run left, or forged by user code.
            if kind == DROPPED or size + DISPLAY_COST > context.display_room:
                self._report_drop(context, run, size)
            elif size:
                context.display_room -= size + DISPLAY_COST
                process.display, process.display_size = bytearray(), size
        elif kind == DONE:
            number, exit_code = _unpack(DONE_BODY, body)
            if run is not None and number == run.job_number:
                self._done(context, process, exit_code)
        else:
            raise ValueError

    def _add_piece(self, context: Context, process: ContextProcess, body: bytes) -> None:
        if process.display is None or context.run is None:
            return
        process.display += body
        if len(process.display) > process.display_size:
            raise ValueError
        if len(process.display) == process.display_size:
            payload, process.display = bytes(process.display), None
            # Output that was printed before the display comes first.
            context.run.pipes.take()
            self._runs.add_entry(context.run, frames.DISPLAY, payload.replace(b"\n", b" "))

    def _report_drop(self, context: Context, run: Run, size: int) -> None:
        if context.reported_drop:
            return
        context.reported_drop = True
        limit = run.request["results_limit"]
        text = "… dropped: %d bytes, and all later displays; %d bytes are kept" % (size, limit)
        entry = {"type": "display", "data": {"text/plain": text}, "metadata": {"dropped": True}}
        self._runs.add_entry(run, frames.DISPLAY, minijson.dumps(entry))


def _unpack(form: Any, body: bytes) -> tuple[int, int]:
    if len(body) != form.size:
        raise ValueError
    first, second = form.unpack(body)
    return first, second
