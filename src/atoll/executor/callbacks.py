"""
Callbacks: HTTP requests that report readiness, status, heartbeats and results, in addition to the
link.

A result is posted until the callback URL accepts it or the link acknowledges it. A result that the
link acknowledges at once is never posted.

A child process (the reporter) makes the requests, one at a time, so PID 1 never blocks. Only the
reporter reads the URL and the token, from a file descriptor that PID 1 passes to it. So neither is
in the memory that PID 1 shares with the zygote and with user code. User code can kill the reporter,
like any process of the namespace; the next request then starts a new one. The reporter refuses the
sandbox's loopback address, because user code may listen there.

A queued callback is a key and a function; the body is built just before it is sent.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import os
import struct

from ..protocol import minijson
from . import processes, syscalls
from .event_loop import READ, WRITE, Loop, Timer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from .runs.run import Run

STATUS_DELAY = 0.1
"""A run that ends sooner is not reported as running."""
RESULT_DELAY = 0.5
"""Time for the link to acknowledge a result before it is posted."""
HEARTBEAT_INTERVAL = 5.0
MIN_RETRY_DELAY, MAX_RETRY_DELAY = 1.0, 30.0
RESTART_DELAY = 1.0
"""The client process is started at most once in this time, however often it is killed."""
STEP_TIMEOUT = 10.0
"""For each network operation of a request."""
POST_TIMEOUT = 60.0
"""For one request; then the process that makes it is replaced."""

POST = struct.Struct("!HHI")  # lengths of path, idempotency key and body, which follow
DONE, RETRY, REJECTED = b"d", b"a", b"r"
ACCEPTED_STATUSES = (404, 409)
"""Besides 2xx: the control plane does not need it, or has it already."""
RETRIED_STATUSES = (408, 425, 429)
"""Besides 5xx."""


class Callback:
    """One request to make, now or later."""

    __slots__ = ("body", "path", "retried", "retry_delay", "timer")

    def __init__(self, path: str, body: Callable[[], Any], retried: bool) -> None:
        self.path = path
        self.body = body
        """
        Builds the body just before it is sent; returns None if the request is no longer needed.
        """
        self.retried = retried
        self.retry_delay = MIN_RETRY_DELAY
        self.timer: Timer | None = None


class Callbacks:
    """Queues callbacks and passes them to the reporter. Does nothing without a configuration."""

    def __init__(self, loop: Loop, config: dict[str, Any] | None, own_processes: set[int]) -> None:
        self._loop = loop
        self._config = config
        self._own_processes = own_processes
        self._due: dict[str, Callback] = {}
        """By idempotency key, in the order they came due."""
        self._delayed: dict[str, Callback] = {}
        self._with_heartbeat: set[str] = set()
        """Runs that heartbeats are posted for."""
        self._posting: tuple[str, Callback] | None = None
        self._socket: _socket.socket | None = None
        self._out = memoryview(b"")
        self._post_timer: Timer | None = None
        self._may_start = True
        self._was_ready = False
        self.pid = 0
        """The process that makes the requests; 0 while there is none."""

    # Events

    def instance_ready(self) -> None:
        if self._config is not None and not self._was_ready:
            self._was_ready = True
            instance = self._config["instance"]
            callback = Callback("/internal/instances/%s/ready" % instance, dict, retried=True)
            self._schedule("%s_ready" % instance, callback, 0)

    def run_began(self, run: Run) -> None:
        if self._config is None:
            return
        callback = Callback(_path(run, "status"), lambda: _running(run), retried=True)
        self._schedule("%s_status" % run.id, callback, STATUS_DELAY)
        if run.id not in self._with_heartbeat:
            self._with_heartbeat.add(run.id)
            self._loop.after(HEARTBEAT_INTERVAL, lambda: self._beat(run))

    def _beat(self, run: Run) -> None:
        if run.result is not None:
            self._with_heartbeat.discard(run.id)
        else:
            callback = Callback(_path(run, "heartbeat"), lambda: _running(run), retried=False)
            self._schedule("%s_heartbeat" % run.id, callback, 0)
            self._loop.after(HEARTBEAT_INTERVAL, lambda: self._beat(run))

    def run_ended(self, run: Run) -> None:
        if self._config is not None:
            callback = Callback(_path(run, "result"), lambda: _result(run), retried=True)
            self._schedule("%s_result" % run.id, callback, RESULT_DELAY)

    def run_acknowledged(self, run_id: str) -> None:
        key = "%s_result" % run_id
        self._due.pop(key, None)
        callback = self._delayed.pop(key, None)
        if callback is not None and callback.timer is not None:
            callback.timer.cancel()
        if self._posting is not None and self._posting[0] == key:
            self._posting[1].retried = False

    # The queue

    def _schedule(self, key: str, callback: Callback, delay: float) -> None:
        def due() -> None:
            if self._delayed.pop(key, None) is not None:
                self._due[key] = callback
                self._post_next()

        before = self._delayed.get(key)
        if before is not None and before.timer is not None:
            before.timer.cancel()
        self._delayed[key] = callback
        callback.timer = self._loop.after(delay, due)

    def _post_next(self) -> None:
        while self._due and self._posting is None:
            if self._socket is None and not self._start():
                return
            key = next(iter(self._due))
            callback = self._due.pop(key)
            content = callback.body()
            if content is None:
                continue
            path, body = callback.path.encode(), minijson.dumps(content)
            name = key.encode("ascii", "replace")
            self._posting = (key, callback)
            lengths = POST.pack(len(path), len(name), len(body))
            self._out = memoryview(lengths + path + name + body)
            self._post_timer = self._loop.after(POST_TIMEOUT, self._kill_process)
            self._send()

    def _answered(self, answer: bytes) -> None:
        if self._post_timer is not None:
            self._post_timer.cancel()
        if self._posting is None:
            return
        (key, callback), self._posting = self._posting, None
        if answer == RETRY and callback.retried and key not in self._delayed:
            self._schedule(key, callback, callback.retry_delay)
            callback.retry_delay = min(callback.retry_delay * 2, MAX_RETRY_DELAY)

    # The process

    def _start(self) -> bool:
        assert self._config is not None
        if not self._may_start:
            return False
        self._may_start = False
        self._loop.after(RESTART_DELAY, self._allow_start)
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
        try:
            self.pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            return False
        if self.pid == 0:
            _make_requests(theirs, self._config["fd"])
        theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self._loop.add(ours.fileno(), READ, self._ready)
        self._own_processes.add(self.pid)
        return True

    def _allow_start(self) -> None:
        self._may_start = True
        self._post_next()

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
            self._post_next()

    def _send(self) -> None:
        assert self._socket is not None
        try:
            while self._out:
                self._out = self._out[self._socket.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError:
            self._out = memoryview(b"")  # It has exited; the event loop is about to handle that.
        self._loop.change(self._socket.fileno(), READ | WRITE if self._out else READ)

    def _kill_process(self) -> None:
        if self.pid:
            processes.send(self.pid, signal.SIGKILL)

    def _lost(self) -> None:
        assert self._socket is not None
        self._loop.remove(self._socket.fileno())
        self._socket.close()
        self._socket = None
        self._out = memoryview(b"")
        self._own_processes.discard(self.pid)
        self.pid = 0
        self._answered(RETRY)


def _path(run: Run, what: str) -> str:
    return "/internal/executions/%s/%s" % (run.id, what)


def _running(run: Run) -> Any:
    return {"status": "running"} if run.result is None else None


def _result(run: Run) -> Any:
    from binascii import b2a_base64  # Needs a library that an image may not have.

    log = [
        (sequence, channel, b2a_base64(data, newline=False).decode("ascii"))
        for sequence, channel, data in run.log.numbered()
    ]
    return {"result": run.result, "log": log}


# In the process that makes the requests


def _make_requests(line: _socket.socket, fd: int) -> None:
    """Never returns."""
    try:
        # Like PID 1 it is not dumpable, so what it reads stays private.
        syscalls.set_name("reporter")
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        syscalls.close_descriptors_except(0, 1, 2, line.fileno(), fd)
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
        return REJECTED
    try:
        # Read again each time: the token may have been renewed.
        callback = minijson.loads(os.pread(fd, 65_536, 0))
        url = urlsplit(callback["url"])
        if url.scheme not in ("http", "https") or url.hostname is None:
            return REJECTED
        secure = url.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(url.hostname, url.port, timeout=STEP_TIMEOUT)
        headers = {
            "Authorization": "Bearer %s" % callback["token"],
            "Content-Type": "application/json",
            "Idempotency-Key": key.decode("ascii"),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return REJECTED
    try:
        connection.connect()
        if not callback.get("loopback") and _is_loopback(connection.sock.getpeername()[0]):
            return REJECTED
        connection.request("POST", url.path.rstrip("/") + path.decode("ascii"), body, headers)
        status = connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return RETRY
    except ValueError:
        return REJECTED  # An id or a token that cannot be part of a request.
    finally:
        connection.close()
    if 200 <= status < 300 or status in ACCEPTED_STATUSES:
        return DONE
    return RETRY if status >= 500 or status in RETRIED_STATUSES else REJECTED


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith(("127.", "::ffff:127."))
