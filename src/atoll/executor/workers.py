"""
Worker processes for requests that may take long: copying, packing, searching, watching.

PID 1 forks a worker, which uses the stream as if it were its own and may block. PID 1 only forwards
frames between the two, within the stream's credit. A worker has a memory limit, is as closed to
user code as PID 1, and ends with its stream. User code can kill it, like any process of its
namespace; then this request fails and nothing else.
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    Work = Callable[["WorkerStream"], Any]
    """Runs in the worker; returns the END of the request."""

MAX_WORKERS = {"work": 8, "watch": 16}
"""Workers of each kind at a time."""
UNDO_SECONDS = 2.0
"""Seconds for a worker to undo unfinished work after its stream was closed."""
MAX_MEMORY = 128 * 1024 * 1024
"""
Bytes that a worker may use beyond what it is forked with. Where there are control groups, the
instance's limit bounds all workers together.
"""


class StreamClosed(Exception):
    """The client does not wait for the answer any more."""


class Workers:
    def __init__(self, loop: Loop, root: int, own_processes: set[int]) -> None:
        self._loop = loop
        self._root = root
        self._own_processes = own_processes
        self._kinds: dict[int, str] = {}

    def start(self, stream: Stream, work: Work, kind: str = "work") -> None:
        if list(self._kinds.values()).count(kind) >= MAX_WORKERS[kind]:
            message = "the session already runs %d requests of this kind" % MAX_WORKERS[kind]
            raise Refusal("executor_busy", message)
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            pid = os.fork()
        except OSError as error:
            ours.close()
            theirs.close()
            raise Refusal(
                "executor_busy", "no process could be started for this request: %s" % error
            ) from None
        if pid == 0:
            _run_worker(theirs, self._root, work)
        theirs.close()
        self._kinds[pid] = kind
        self._own_processes.add(pid)
        _Forwarder(self._loop, stream, ours, lambda: self._kill_soon(pid))

    def child_exited(self, pid: int) -> None:
        if self._kinds.pop(pid, None) is not None:
            self._own_processes.discard(pid)

    def _kill_soon(self, pid: int) -> None:
        def kill() -> None:
            # Only while it is registered: another process may have its pid by then.
            if pid in self._kinds:
                processes.send(pid, signal.SIGKILL)

        self._loop.after(UNDO_SECONDS, kill)


class _Forwarder:
    """Forwards frames between a stream and its worker; PID 1's part."""

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
        stream.on_data = lambda payload: self._send(frames.encode(0, frames.DATA, payload))
        stream.on_finish = lambda: self._send(frames.encode(0, frames.FINISH))
        stream.on_reset = self._close
        loop.add(socket.fileno(), READ, self._ready)

    def _credit(self) -> None:
        more = self._stream.credit + self._sent - self._granted
        self._granted += more
        self._send(frames.encode(0, frames.CREDIT, frames.CREDIT_BODY.pack(more)))

    def _send(self, data: bytes) -> None:
        # Bounded by the credit that the worker has granted.
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
            self._out.clear()  # It has exited; the event loop is about to handle that.
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
                self._stream.error("file_error", "the worker process of this request was killed")
                return
            for _, kind, payload in self._decoder.feed(data):
                self._forward(kind, payload)
                if not self._open:
                    return

    def _forward(self, kind: int, payload: bytes) -> None:
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


# In the worker


class WorkerStream:
    """The worker's end of the stream. All methods block."""

    def __init__(self, socket: _socket.socket) -> None:
        self._socket = socket
        self._decoder = frames.Decoder()
        self._credit = frames.WINDOW
        self._received: list[bytes] = []
        self._finished = False

    @property
    def fd(self) -> int:
        """Readable when credit was granted or the stream was closed."""
        return self._socket.fileno()

    @property
    def credit(self) -> int:
        return self._credit

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            while self._credit <= 0:
                self.wait()
            piece = view[: min(self._credit, frames.CHUNK)]
            self._credit -= len(piece)
            self._write(frames.encode(0, frames.DATA, bytes(piece)))
            view = view[len(piece) :]

    def read(self, size: int = -1) -> bytes:
        """At most `size` received bytes; none at the end."""
        while not self._received:
            if self._finished:
                return b""
            self.wait()
        data = self._received[0]
        if 0 <= size < len(data):
            self._received[0] = data[size:]
            data = data[:size]
        else:
            del self._received[0]
        self._write(frames.encode(0, frames.CREDIT, frames.CREDIT_BODY.pack(len(data))))
        return data

    def event(self, value: Any) -> None:
        self._write(frames.encode_json(0, frames.EVENT, value))

    def wait(self) -> None:
        """Wait for data or credit."""
        try:
            data = self._socket.recv(262_144)
        except OSError:
            data = b""
        if not data:
            raise StreamClosed
        for _, kind, payload in self._decoder.feed(data):
            if kind == frames.CREDIT:
                self._credit += frames.decode_credit(payload)
            elif kind == frames.DATA:
                self._received.append(payload)
            elif kind == frames.FINISH:
                self._finished = True

    def _write(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError:
            raise StreamClosed from None

    def end(self, value: Any) -> None:
        self._write(frames.encode(0, frames.END, minijson.dumps(value)))

    def error(self, code: str, message: str) -> None:
        self._write(frames.encode_json(0, frames.ERROR, {"code": code, "message": message}))


def _run_worker(socket: _socket.socket, root: int, work: Work) -> None:
    """Never returns."""
    try:
        # Like PID 1 it is not dumpable.
        syscalls.set_name("files")
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        syscalls.close_descriptors_except(0, 1, 2, socket.fileno(), root)
        _limit_memory()
        try:
            _answer(WorkerStream(socket), work)
        except StreamClosed:
            pass
    except BaseException:  # noqa: BLE001 - the process ends here; nothing may return into PID 1
        import traceback

        traceback.print_exc()
    finally:
        os._exit(0)


def _answer(stream: WorkerStream, work: Work) -> None:
    try:
        stream.end(work(stream))
    except FileError as error:
        stream.error(error.code, str(error))
    except MemoryError:
        stream.error("too_large", "the request needs more memory than one request may use")
    except ImportError as error:
        # The image's interpreter was built without a module of the standard library.
        stream.error("unsupported", "the template's Python does not support this: %s" % error)
    except OSError as error:
        refused = translate(error, "it")
        stream.error(refused.code, str(refused))
    except (KeyError, TypeError, ValueError) as error:
        stream.error("bad_request", "%s: %s" % (type(error).__name__, error))


def _limit_memory() -> None:
    import resource

    with open("/proc/self/statm", "rb") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = now + MAX_MEMORY
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
