"""
Requests that take long, each in a process of its own: copying, packing, searching, watching.

PID 1 forks a child, which talks to the control plane as if it had the stream for itself: it blocks
where it likes and nobody waits for it. PID 1 only passes on what both say, frame by frame, by the
credit of the stream. The child has a bound on memory, is as closed to user code as PID 1 is, and
ends with its stream. User code can kill it, as any process of its namespace; then the request fails
and nothing else.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import os

from ..protocol import frames, minijson
from . import processes, syscalls
from .connection import Refusal, Stream
from .event_loop import READ, WRITE, Loop
from .files.paths import FileError, translate
from .interpreter import zygote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    Work = Callable[["Line"], Any]
    """What a child does; it returns the END of the request."""

MOST = {"work": 8, "watch": 16}
"""How many children of each kind there may be at once."""
GRACE_SECONDS = 2.0
"""For a child whose stream is gone, to undo what it has half done."""
MEMORY = 128 * 1024 * 1024
"""
Bytes that a child may take beyond what it is forked with. What all of an instance may take bounds
them together, where there are control groups.
"""


class Gone(Exception):
    """Nobody waits for the answer any more."""


class Workers:
    def __init__(self, loop: Loop, root: int) -> None:
        self._loop = loop
        self._root = root
        self._kinds: dict[int, str] = {}
        self.on_process: Callable[[], None] = lambda: None

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(self._kinds)

    def start(self, stream: Stream, work: Work, kind: str = "work") -> None:
        if list(self._kinds.values()).count(kind) >= MOST[kind]:
            words = "%d requests of this kind are under way in this session already" % MOST[kind]
            raise Refusal("executor_busy", words)
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            raise Refusal("executor_busy", "no process for this request: %s" % error) from None
        if pid == 0:
            _be_a_worker(theirs, self._root, work)
        theirs.close()
        self._kinds[pid] = kind
        self.on_process()
        _Relay(self._loop, stream, ours, lambda: self._end_soon(pid))

    def exited(self, pid: int) -> None:
        if self._kinds.pop(pid, None) is not None:
            self.on_process()

    def _end_soon(self, pid: int) -> None:
        def end() -> None:
            # By its record and not by its number alone, which another process may have got.
            if pid in self._kinds:
                processes.send(pid, signal.SIGKILL)

        self._loop.after(GRACE_SECONDS, end)


class _Relay:
    """PID 1's part of it."""

    def __init__(
        self, loop: Loop, stream: Stream, socket: _socket.socket, closed: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._stream = stream
        self._socket = socket
        self._closed = closed
        self._decoder = frames.Decoder()
        self._out = bytearray()
        self._sent = 0
        self._granted = stream.credit
        self._open = True
        socket.setblocking(False)
        stream.on_credit = self._credit
        stream.on_data = lambda payload: self._tell(frames.encode(0, frames.DATA, payload))
        stream.on_finish = lambda: self._tell(frames.encode(0, frames.FINISH))
        stream.on_reset = self._close
        loop.add(socket.fileno(), READ, self._ready)

    def _credit(self) -> None:
        more = self._stream.credit + self._sent - self._granted
        self._granted += more
        self._tell(frames.encode(0, frames.CREDIT, frames.CREDIT_BODY.pack(more)))

    def _tell(self, data: bytes) -> None:
        # Bounded by the credit that the child has given.
        self._out += data
        self._flush()

    def _flush(self) -> None:
        if not self._open:
            return
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # It is gone, which the loop is about to see.
        self._loop.change(self._socket.fileno(), READ | WRITE if self._out else READ)

    def _ready(self, mask: int) -> None:
        if mask & WRITE:
            self._flush()
        if mask & ~WRITE and self._open:
            try:
                data = self._socket.recv(262_144)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._close()
                self._stream.error("file_error", "the process that did this was ended")
                return
            for _, kind, payload in self._decoder.feed(data):
                self._pass_on(kind, payload)
                if not self._open:
                    return

    def _pass_on(self, kind: int, payload: bytes) -> None:
        stream = self._stream
        if kind == frames.DATA:
            self._sent += len(payload)
            stream.send(kind, payload)
            return
        if kind in (frames.END, frames.ERROR):
            self._close()
            stream.connection.close_stream(stream.number)
        stream.connection.write(frames.encode(stream.number, kind, payload))

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove(self._socket.fileno())
            self._socket.close()
            self._closed()


# In the child


class Line:
    """The child's end of the stream. Everything here waits for the other end."""

    def __init__(self, socket: _socket.socket) -> None:
        self._socket = socket
        self._decoder = frames.Decoder()
        self._credit = frames.WINDOW
        self._come: list[bytes] = []
        self._finished = False

    @property
    def fd(self) -> int:
        """Readable when something was granted, or nobody listens any more."""
        return self._socket.fileno()

    @property
    def credit(self) -> int:
        return self._credit

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            while self._credit <= 0:
                self.hear()
            piece = view[: min(self._credit, frames.CHUNK)]
            self._credit -= len(piece)
            self._say(frames.encode(0, frames.DATA, bytes(piece)))
            view = view[len(piece) :]

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes of what is sent to us; none when that is all."""
        while not self._come:
            if self._finished:
                return b""
            self.hear()
        data = self._come[0]
        if 0 <= size < len(data):
            self._come[0] = data[size:]
            data = data[:size]
        else:
            del self._come[0]
        self._say(frames.encode(0, frames.CREDIT, frames.CREDIT_BODY.pack(len(data))))
        return data

    def event(self, value: Any) -> None:
        self._say(frames.encode_json(0, frames.EVENT, value))

    def hear(self) -> None:
        """Wait for a word of the other end."""
        try:
            data = self._socket.recv(262_144)
        except OSError:
            data = b""
        if not data:
            raise Gone
        for _, kind, payload in self._decoder.feed(data):
            if kind == frames.CREDIT:
                self._credit += frames.decode_credit(payload)
            elif kind == frames.DATA:
                self._come.append(payload)
            elif kind == frames.FINISH:
                self._finished = True

    def _say(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError:
            raise Gone from None

    def end(self, value: Any) -> None:
        self._say(frames.encode(0, frames.END, minijson.dumps(value)))

    def error(self, code: str, message: str) -> None:
        self._say(frames.encode_json(0, frames.ERROR, {"code": code, "message": message}))


def _be_a_worker(socket: _socket.socket, root: int, work: Work) -> None:
    """Never returns."""
    try:
        # Not dumpable, as PID 1 is not.
        syscalls.set_name("files")
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        zygote._close_all_but(0, 1, 2, socket.fileno(), root)
        _bound_memory()
        line = Line(socket)
        try:
            _answer(line, work)
        except Gone:
            pass
    except BaseException:  # noqa: BLE001 - the process ends here; nothing may return into PID 1
        import traceback

        traceback.print_exc()
    finally:
        os._exit(0)


def _answer(line: Line, work: Work) -> None:
    try:
        line.end(work(line))
    except FileError as error:
        line.error(error.code, str(error))
    except MemoryError:
        line.error("too_large", "this takes more memory than there is for one request")
    except ImportError as error:
        # Of an interpreter that was built with less than ours.
        line.error("unsupported", "the template's Python cannot do this: %s" % error)
    except OSError as error:
        refused = translate(error, "it")
        line.error(refused.code, str(refused))
    except (KeyError, TypeError, ValueError) as error:
        line.error("bad_request", "%s: %s" % (type(error).__name__, error))


def _bound_memory() -> None:
    import resource

    with open("/proc/self/statm", "rb") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = now + MEMORY
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
