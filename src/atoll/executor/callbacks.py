"""
What the executor tells a callback address besides its link: that it is ready, what runs, results.

A result is reported until somebody has taken it: the address, or the link by an acknowledgement.
What the link takes at once is never reported. Nothing here waits: the posts are made by a process
of its own, one at a time, which is given the next when it is done with the last. It alone reads the
address and the token, from a file that PID 1 only passes on: so neither is in the memory that PID 1
shares with the zygote, and through it with user code. User code can end that process, as any of its
own namespace; then a new one is started for the next post. It does not trust the sandbox's
loopback, on which user code may listen.

What waits is a name and a time; a body is made when its turn comes.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import os
import struct

from ..protocol import minijson
from . import processes, syscalls
from .event_loop import READ, WRITE, Loop, Timer
from .interpreter import zygote

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from .runs.runs import Run

STATUS_SECONDS = 0.1
"""A run that ends sooner is not reported as running."""
RESULT_SECONDS = 0.5
"""The link's time to acknowledge a result before it is reported."""
HEARTBEAT_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
POST_SECONDS = 10.0
"""For each step of a post."""
STUCK_SECONDS = 60.0
"""For a whole post, after which the process that makes it is replaced."""

POST = struct.Struct("!HHI")  # lengths of path, idempotency key and body, which follow
DONE, AGAIN, REFUSED = b"d", b"a", b"r"
SETTLED = (404, 409)
"""Besides 2xx: there is nothing to be told, or it was told already."""
PASSING = (408, 425, 429)


class Report:
    __slots__ = ("body", "path", "pause", "repeated", "timer")

    def __init__(self, path: str, body: Callable[[], Any], repeated: bool) -> None:
        self.path = path
        self.body = body
        """What to tell, when its turn comes; None when there is nothing to tell any more."""
        self.repeated = repeated
        self.pause = FIRST_PAUSE
        self.timer: Timer | None = None


class Reports:
    """Without a `callback` nothing is reported."""

    def __init__(self, loop: Loop, callback: dict[str, Any] | None) -> None:
        self._loop = loop
        self._callback = callback
        self._due: dict[str, Report] = {}
        """By idempotency key, in the order they came due."""
        self._waiting: dict[str, Report] = {}
        self._beating: set[str] = set()
        self._posting: tuple[str, Report] | None = None
        self._socket: _socket.socket | None = None
        self._out = memoryview(b"")
        self._stuck: Timer | None = None
        self._may_start = True
        self._was_ready = False
        self.pid = 0
        """Of the process that makes the posts; 0 while there is none."""
        self.on_process: Callable[[], None] = lambda: None

    # What happens

    def ready(self) -> None:
        if self._callback is not None and not self._was_ready:
            self._was_ready = True
            instance = self._callback["instance"]
            report = Report("/internal/instances/%s/ready" % instance, dict, repeated=True)
            self._wait("%s_ready" % instance, report, 0)

    def began(self, run: Run) -> None:
        if self._callback is None:
            return
        report = Report(_path(run, "status"), lambda: _while_it_runs(run), repeated=True)
        self._wait("%s_status" % run.id, report, STATUS_SECONDS)
        if run.id not in self._beating:
            self._beating.add(run.id)
            self._loop.after(HEARTBEAT_SECONDS, lambda: self._beat(run))

    def _beat(self, run: Run) -> None:
        if run.result is not None:
            self._beating.discard(run.id)
        else:
            report = Report(_path(run, "heartbeat"), lambda: _while_it_runs(run), repeated=False)
            self._wait("%s_heartbeat" % run.id, report, 0)
            self._loop.after(HEARTBEAT_SECONDS, lambda: self._beat(run))

    def ended(self, run: Run) -> None:
        if self._callback is not None:
            report = Report(_path(run, "result"), lambda: _content(run), repeated=True)
            self._wait("%s_result" % run.id, report, RESULT_SECONDS)

    def acknowledged(self, run_id: str) -> None:
        key = "%s_result" % run_id
        self._due.pop(key, None)
        report = self._waiting.pop(key, None)
        if report is not None and report.timer is not None:
            report.timer.cancel()
        if self._posting is not None and self._posting[0] == key:
            self._posting[1].repeated = False

    # The line

    def _wait(self, key: str, report: Report, seconds: float) -> None:
        def due() -> None:
            if self._waiting.pop(key, None) is not None:
                self._due[key] = report
                self._next()

        before = self._waiting.get(key)
        if before is not None and before.timer is not None:
            before.timer.cancel()
        self._waiting[key] = report
        report.timer = self._loop.after(seconds, due)

    def _next(self) -> None:
        while self._due and self._posting is None:
            if self._socket is None and not self._start():
                return
            key = next(iter(self._due))
            report = self._due.pop(key)
            told = report.body()
            if told is None:
                continue
            path, body = report.path.encode(), minijson.dumps(told)
            name = key.encode("ascii", "replace")
            self._posting = (key, report)
            lengths = POST.pack(len(path), len(name), len(body))
            self._out = memoryview(lengths + path + name + body)
            self._stuck = self._loop.after(STUCK_SECONDS, self._replace)
            self._send()

    def _answered(self, answer: bytes) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
        if self._posting is None:
            return
        (key, report), self._posting = self._posting, None
        if answer == AGAIN and report.repeated and key not in self._waiting:
            self._wait(key, report, report.pause)
            report.pause = min(report.pause * 2, LONGEST_PAUSE)

    # The process

    def _start(self) -> bool:
        assert self._callback is not None
        if not self._may_start:
            return False
        # However often it is killed, one a second is started.
        self._may_start = False
        self._loop.after(FIRST_PAUSE, self._start_again)
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            self.pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            return False
        if self.pid == 0:
            _make_posts(theirs, self._callback["fd"])
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self._loop.add(ours.fileno(), READ, self._ready)
        self.on_process()
        return True

    def _start_again(self) -> None:
        self._may_start = True
        self._next()

    def _ready(self, mask: int) -> None:
        if mask & WRITE:
            self._send()
        if mask & ~WRITE and self._socket is not None:
            try:
                answer = self._socket.recv(1)
            except BlockingIOError:
                return
            except OSError:
                answer = b""
            if answer:
                self._answered(answer)
            else:
                self._lost()
            self._next()

    def _send(self) -> None:
        assert self._socket is not None
        try:
            while self._out:
                self._out = self._out[self._socket.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self._out = memoryview(b"")  # It is gone, which the loop is about to see.
        self._loop.change(self._socket.fileno(), READ | WRITE if self._out else READ)

    def _replace(self) -> None:
        if self.pid:
            processes.send(self.pid, signal.SIGKILL)

    def _lost(self) -> None:
        assert self._socket is not None
        self._loop.remove(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._out = memoryview(b"")
        self.pid = 0
        self.on_process()
        self._answered(AGAIN)


def _path(run: Run, what: str) -> str:
    return "/internal/executions/%s/%s" % (run.id, what)


def _while_it_runs(run: Run) -> Any:
    return {"status": "running"} if run.result is None else None


def _content(run: Run) -> Any:
    from binascii import b2a_base64  # Needs a library that an image may not have.

    log = [
        (sequence, channel, b2a_base64(data, newline=False).decode("ascii"))
        for sequence, channel, data in run.log.numbered()
    ]
    return {"result": run.result, "log": log}


# In the process that makes the posts


def _make_posts(line: _socket.socket, fd: int) -> None:
    """Never returns."""
    try:
        # Not dumpable, as PID 1 is not: what it reads stays its own.
        syscalls.set_name("reporter")
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        zygote._close_all_but(0, 1, 2, line.fileno(), fd)
        while True:
            path, key, body = _receive(line)
            line.send(_post(fd, path, key, body))
    finally:
        os._exit(0)


def _receive(line: _socket.socket) -> list[bytes]:
    return [_exactly(line, size) for size in POST.unpack(_exactly(line, POST.size))]


def _exactly(line: _socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = line.recv(min(size - len(data), 1 << 20))
        if not piece:
            os._exit(0)
        data += piece
    return bytes(data)


def _post(fd: int, path: bytes, key: bytes, body: bytes) -> bytes:
    try:
        import http.client
        from urllib.parse import urlsplit
    except ImportError:
        return REFUSED
    try:
        # Anew each time: a token may have been replaced by one that lives longer.
        callback = minijson.loads(os.pread(fd, 65_536, 0))
        url = urlsplit(callback["url"])
        if url.scheme not in ("http", "https") or url.hostname is None:
            return REFUSED
        secure = url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(url.hostname, url.port, timeout=POST_SECONDS)
        headers = {
            "Authorization": "Bearer %s" % callback["token"],
            "Content-Type": "application/json",
            "Idempotency-Key": key.decode("ascii"),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return REFUSED
    try:
        connection.connect()
        if not callback.get("loopback") and _is_loopback(connection.sock.getpeername()[0]):
            return REFUSED
        connection.request("POST", url.path.rstrip("/") + path.decode("ascii"), body, headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return AGAIN
    except ValueError:
        return REFUSED  # An id or a token that is no part of a request.
    finally:
        connection.close()
    if 200 <= status < 300 or status in SETTLED:
        return DONE
    return AGAIN if status >= 500 or status in PASSING else REFUSED


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith(("127.", "::ffff:127."))
