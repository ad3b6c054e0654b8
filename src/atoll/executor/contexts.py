"""
Contexts: processes that live between executions and keep their state, as the supervisor sees them.

A context has one process at a time, a fork of the zygote, and one execution at a time in it. The
executor is the truth about contexts: they are gone with it. What a process says on its socket is
user code's word: it can end its own execution early, show something, and nothing more; one that
closes the socket, or talks nonsense, is ended. A context whose process has ended is dead until it
is started again; the process of one outlives the zygote that it came from.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import os
import time

from ..protocol import frames, minijson
from . import processes
from .connection import Refusal, Stream
from .event_loop import READ, Loop, Timer
from .interpreter import zygote
from .interpreter.child import FAILURE
from .interpreter.kernel_messages import (
    DONE,
    DONE_BODY,
    DROPPED,
    MAX_MESSAGE,
    PIECE,
    READY,
    SHOW,
    SIZE,
)
from .runs.runs import NO_USAGE, Run, Runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    Submit = Callable[[int, dict[str, Any], list[int]], bool]

LANGUAGES = ("python",)
START_SECONDS = 25.0
UNPARK_SECONDS = 0.05
TIMEOUT_GRACE = 2.0
"""Between SIGINT and the end of a context whose execution took too long."""
MESSAGES = 64
"""So many are taken in one turn, so that one who talks a lot does not keep the others waiting."""
ENTRY_COST = 256
"""What a display costs beyond its bytes: many small ones have a bound too."""
TICKS = os.sysconf("SC_CLK_TCK")


class Host:
    """One process of a context, from the wish for it to its end."""

    def __init__(self, context: Context, number: int) -> None:
        self.context = context
        self.number = number
        self.pid = 0
        self.zygote = 0
        """The zygote that it is a child of, once it is."""
        self.handed = False
        self.socket: _socket.socket | None = None
        self.ready = False
        self.doomed = False
        """Whether it is about to end."""
        self.ended = False
        self.problem: tuple[str, str] | None = None
        self.coming: bytearray | None = None
        """The display that is being told; none when it is not kept."""
        self.expected = 0


class Context:
    def __init__(self, request: dict[str, Any]) -> None:
        self.id: str = request["id"]
        self.request = request
        self.created = time.time()
        self.count = 0
        self.born = False
        """Whether it was ever ready."""
        self.host: Host | None = None
        self.run: Run | None = None
        self.room = 0
        self.dropped = False
        self.began: tuple[float, int] = (0.0, 0)
        self.waiting: list[Stream] = []
        """Who is told when it can be used."""
        self.starting: Timer | None = None
        self.on_dead: list[Callable[[], None]] = []

    @property
    def state(self) -> str:
        if self.host is None or self.host.doomed:
            return "dead"
        return "busy" if self.run is not None or not self.host.ready else "idle"

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "language": self.request["language"],
            "cwd": self.request["cwd"],
            "state": self.state,
            "created": self.created,
            "execution_count": self.count,
        }


class Contexts:
    def __init__(
        self,
        loop: Loop,
        runs: Runs,
        submit: Submit,
        see_taken: Callable[[], None],
        settle: Callable[[], None],
        limit: Callable[[dict[str, int]], None],
    ) -> None:
        self._loop = loop
        self._runs = runs
        self._see_taken = see_taken
        self._limit = limit
        """Sets what is watched as long as there are contexts."""
        self._submit = submit
        """Hands a job to the zygote; says whether there is one to hand it to."""
        self._settle = settle
        """Told when another number of children is wanted."""
        self._contexts: dict[str, Context] = {}
        self._hosts: dict[int, Host] = {}
        self._given_up: set[int] = set()
        """Jobs that nobody has taken, and whoever does is to end."""
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
            message = "%s has no contexts; only %s has."
            raise Refusal(
                "language_unsupported", message % (request["language"], ", ".join(LANGUAGES))
            )
        known = self._contexts.get(request["id"])
        if known is None:
            if len(self._contexts) >= request["most"]:
                message = "The session has %d contexts; delete one." % len(self._contexts)
                raise Refusal("too_many_contexts", message)
            known = self._contexts[request["id"]] = Context(request)
            self._limit(request.get("watch", {}))
            self._start(known)
        self._answer(known, stream)

    def _list(self, stream: Stream, request: dict[str, Any]) -> None:
        stream.end({"contexts": [context.describe() for context in self._contexts.values()]})

    def _restart(self, stream: Stream, request: dict[str, Any]) -> None:
        context = self._get(request["id"])

        def again() -> None:
            if context.host is None:
                self._start(context)
            self._answer(context, stream)

        if context.host is not None and not context.host.ready:
            self._answer(context, stream)
        else:
            self._end(context, again)

    def _interrupt(self, stream: Stream, request: dict[str, Any]) -> None:
        context = self._get(request["id"])
        if context.run is not None and context.host is not None:
            _interrupt(context.host)
        stream.end({"context": context.describe()})

    def _delete(self, stream: Stream, request: dict[str, Any]) -> None:
        context = self._get(request["id"])

        def gone() -> None:
            if self._contexts.get(context.id) is context:
                del self._contexts[context.id]
            stream.end({})

        self._end(context, gone)

    def _get(self, context_id: str) -> Context:
        context = self._contexts.get(context_id)
        if context is None:
            raise Refusal("context_not_found", "Context %s does not exist." % context_id)
        return context

    def _answer(self, context: Context, stream: Stream) -> None:
        if context.host is None or context.host.ready:
            stream.end({"context": context.describe()})
        else:
            context.waiting.append(stream)

    def _end(self, context: Context, then: Callable[[], None]) -> None:
        """End its process, and what runs in it."""
        if context.host is None:
            then()
            return
        context.on_dead.append(then)
        if context.run is not None:
            self._runs.end(context.run, "cancelled", 0.0)
        self._kill(context.host)

    # Processes

    def children(self, zygote_pid: int) -> int:
        """How many of that zygote's children are contexts, or will be."""
        return sum(1 for host in self._hosts.values() if host.zygote in (0, zygote_pid))

    def _start(self, context: Context) -> None:
        number = self._runs.next_number()
        host = context.host = self._hosts[number] = Host(context, number)
        context.count = 0
        context.starting = self._loop.after(START_SECONDS, lambda: self._too_late(host))
        self._hand_over(host)

    def _hand_over(self, host: Host) -> None:
        request = host.context.request
        job = {"kind": "context", "id": request["id"], "code": "", "staging": False}
        for name in ("env", "cwd", "limits"):
            job[name] = request[name]
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            # Too many wait already, or there is no zygote now: `unpark` comes back to it.
            taken = self._submit(host.number, job, [self._null] * 3 + [theirs.fileno()])
        except OSError:
            taken = False
            self._loop.after(UNPARK_SECONDS, self.unpark)
        theirs.close()
        if not taken:
            ours.close()
            return
        ours.setblocking(False)
        host.socket, host.handed = ours, True
        self._loop.add(ours.fileno(), READ, lambda mask: self._ready(host))
        self._settle()

    def unpark(self) -> None:
        """There is a zygote to hand those to that were handed to none."""
        for host in list(self._hosts.values()):
            if not host.handed:
                self._hand_over(host)

    def taken(self, number: int, pid: int, zygote_pid: int) -> None:
        host = self._hosts.get(number)
        if host is None:
            if number in self._given_up:
                self._given_up.discard(number)
                processes.kill_tree(pid)
            return
        host.pid, host.zygote = pid, zygote_pid
        self._runs.hosts[pid] = None
        if host.doomed:
            processes.kill_tree(pid)

    def zygote_lost(self) -> None:
        """Processes that it was the parent of are PID 1's children now, and live on."""
        self._given_up.clear()
        for host in list(self._hosts.values()):
            if not host.pid:
                self._close(host)
                host.handed = False
                if host.doomed:
                    self._gone(host, signal.SIGKILL, dict(NO_USAGE))
            elif processes.read(host.pid) is None:
                # It had taken note of the end of this one, and then could not tell.
                self._gone(host, signal.SIGKILL, dict(NO_USAGE))

    def exited(self, pid: int, status: int, usage: dict[str, float]) -> None:
        for host in list(self._hosts.values()):
            if host.pid == pid:
                self._gone(host, status, usage)

    def _gone(self, host: Host, status: int, usage: dict[str, float]) -> None:
        host.doomed = host.ended = True
        # What it had said before, its own end of the execution above all.
        rounds = 0
        while host.socket is not None and rounds < MESSAGES and self._take(host):
            rounds += 1
        self._close(host)
        self._hosts.pop(host.number, None)
        self._runs.hosts.pop(host.pid, None)
        context = host.context
        context.host = None
        if context.starting is not None:
            context.starting.cancel()
        self._runs.end_strays()
        if context.run is not None:
            self._conclude(context, status, self._usage(context, usage))
        waiting, context.waiting = context.waiting, []
        if not context.born:
            self._contexts.pop(context.id, None)
        for stream in waiting:
            stream.error(*(host.problem or ("context_failed", "The context did not start.")))
        calls, context.on_dead = context.on_dead, []
        for call in calls:
            call()
        self._settle()

    def _too_late(self, host: Host) -> None:
        self._see_taken()
        if host.context.host is host and not host.ready:
            message = "The context did not start within %d seconds." % START_SECONDS
            host.problem = ("context_failed", message)
            self._kill(host)
            if not host.pid and host.context.host is host:
                self._given_up.add(host.number)
                self._gone(host, signal.SIGKILL, dict(NO_USAGE))

    def _kill(self, host: Host) -> None:
        host.doomed = True
        if host.pid:
            processes.kill_tree(host.pid)
        elif not host.handed:
            self._gone(host, signal.SIGKILL, dict(NO_USAGE))

    def _close(self, host: Host) -> None:
        if host.socket is not None:
            self._loop.remove(host.socket.fileno())
            host.socket.close()
            host.socket = None

    # Runs

    def check(self, context_id: str) -> Context:
        """The context that is to run something, if it can."""
        context = self._get(context_id)
        if context.state == "dead":
            raise Refusal("context_dead", "Context %s has ended; restart it." % context_id)
        if context.state == "busy":
            raise Refusal("context_busy", "Context %s is running something." % context_id)
        return context

    def begin(self, context: Context, run: Run) -> None:
        host, request = context.host, run.request
        assert host is not None
        assert host.socket is not None
        job = {name: request[name] for name in ("id", "code", "env", "workspace")}
        job["results_limit"] = context.room = int(request["results_limit"])
        job["staging"] = request.get("staging", True)
        theirs = self._runs.open(run)
        try:
            zygote.send_job(host.socket, run.number, job, theirs)
        except OSError as error:
            self._runs.park(run)
            # It does not read what it is sent, or there is nobody to.
            self._kill(host)
            message = "Context %s cannot be reached: %s." % (context.id, error)
            raise Refusal("context_dead", message) from None
        finally:
            for fd in theirs:
                os.close(fd)
        context.run, context.dropped = run, False
        self._runs.hosts[host.pid] = run
        context.count += 1
        context.began = _used(host.pid)
        run.pid = host.pid
        run.pipes.taken()
        run.stop = lambda reason, grace: self._stop(host, run, reason, grace)
        self._runs.begin(run)

    def _stop(self, host: Host, run: Run, reason: str, grace: float) -> None:
        if reason == "timeout":
            grace = TIMEOUT_GRACE
        elif reason != "cancelled":
            grace = 0.0

        def kill() -> None:
            if host.context.run is run:
                self._kill(host)

        if grace <= 0:
            kill()
            return
        _interrupt(host)
        run.grace = self._loop.after(grace, kill)

    def _conclude(self, context: Context, status: int, usage: dict[str, float]) -> None:
        run, context.run = context.run, None
        if context.host is not None:
            self._runs.hosts[context.host.pid] = None
        if run is None:
            return
        self._runs.conclude(run, status, usage)

    def _usage(self, context: Context, last: dict[str, float] | None = None) -> dict[str, float]:
        """Of one execution: what its process used, less what it had used before."""
        if last is not None:
            return dict(last, cpu=max(0.0, last["cpu"] - context.began[0]))
        assert context.host is not None
        cpu, peak = _used(context.host.pid)
        return dict(NO_USAGE, cpu=max(0.0, cpu - context.began[0]), peak=peak)

    # What a process says

    def _ready(self, host: Host) -> None:
        rounds = 0
        while host.socket is not None and rounds < MESSAGES and self._take(host):
            rounds += 1

    def _take(self, host: Host) -> bool:
        """One message; whether there may be more."""
        assert host.socket is not None
        try:
            # What else is sent along, descriptors above all, is not taken.
            message = host.socket.recv(MAX_MESSAGE)
        except BlockingIOError:
            return False
        except OSError:
            message = b""
        try:
            if not message:
                raise ValueError
            self._hear(host, message[:1], message[1:])
        except (ValueError, RecursionError, frames.ProtocolError):
            self._close(host)
            if host.ended:
                return False
            self._see_taken()
            if host.pid:
                self._kill(host)
            elif host.doomed:
                self._gone(host, signal.SIGKILL, dict(NO_USAGE))
            else:
                # The job was received and never announced, so the context has not begun.
                host.handed = False
                self._hand_over(host)
            return False
        return True

    def _hear(self, host: Host, kind: bytes, body: bytes) -> None:
        """Raises ValueError for what our own code does not say."""
        context, run = host.context, host.context.run
        if kind == READY and not host.ready:
            self._see_taken()
            if not host.pid:
                raise ValueError
            host.ready = context.born = True
            if context.starting is not None:
                context.starting.cancel()
            waiting, context.waiting = context.waiting, []
            for stream in waiting:
                self._answer(context, stream)
        elif kind == FAILURE and not host.ready:
            said = frames.decode_json(body) if len(body) < MAX_MESSAGE else {}
            host.problem = ("bad_cwd", str(said.get("message"))[:1000])
        elif kind == PIECE:
            self._piece(context, host, body)
        elif kind in (SHOW, DROPPED):
            number, size = _unpack(SIZE, body)
            host.coming, host.expected = None, 0
            if run is None or number != run.number:
                return  # Of a thread that an earlier execution left, or of one who lies.
            if kind == DROPPED or size + ENTRY_COST > context.room:
                self._drop(context, run, size)
            elif size:
                context.room -= size + ENTRY_COST
                host.coming, host.expected = bytearray(), size
        elif kind == DONE:
            number, code = _unpack(DONE_BODY, body)
            if run is not None and number == run.number:
                self._conclude(context, code << 8, self._usage(context))
        else:
            raise ValueError

    def _piece(self, context: Context, host: Host, body: bytes) -> None:
        if host.coming is None or context.run is None:
            return
        host.coming += body
        if len(host.coming) > host.expected:
            raise ValueError
        if len(host.coming) == host.expected:
            payload, host.coming = bytes(host.coming), None
            # What was printed before it comes before it.
            context.run.pipes.take()
            self._runs.add_entry(context.run, frames.DISPLAY, payload.replace(b"\n", b" "))

    def _drop(self, context: Context, run: Run, size: int) -> None:
        if context.dropped:
            return
        context.dropped = True
        words = "… dropped: %d bytes, and what follows; %d are kept of all that is shown" % (
            size,
            run.request["results_limit"],
        )
        entry = {"type": "display", "data": {"text/plain": words}, "metadata": {"dropped": True}}
        self._runs.add_entry(run, frames.DISPLAY, minijson.dumps(entry))


def _unpack(form: Any, body: bytes) -> tuple[int, int]:
    if len(body) != form.size:
        raise ValueError
    first, second = form.unpack(body)
    return first, second


def _interrupt(host: Host) -> None:
    """As Ctrl-C does it: to its whole process group."""
    if host.pid:
        processes.send(-host.pid, signal.SIGINT)


def _used(pid: int) -> tuple[float, int]:
    """Seconds of the processor and peak of memory, with its children that have ended."""
    cpu, peak = 0.0, 0
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            text = file.read()
        cpu = sum(int(ticks) for ticks in text[text.rindex(b")") + 2 :].split()[11:15]) / TICKS
        with open("/proc/%d/status" % pid, "rb") as file:
            for line in file:
                if line.startswith(b"VmHWM:"):
                    peak = int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # It ends right now.
    return cpu, peak
