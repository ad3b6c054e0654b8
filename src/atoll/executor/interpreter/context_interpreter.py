"""
The process of a context, which keeps its state from one run to the next.

It is a fork of the zygote that receives runs on a socket. Each run comes with descriptors of its
own, which are 0, 1 and 2 while it runs; in between these are /dev/null. SIGINT becomes
KeyboardInterrupt while user code runs, and is ignored in between.

It runs with the rights of user code, so the supervisor does not trust what it reports.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import _socket
import _thread
import io
import os
import sys

from ...protocol import minijson
from . import child, jobs
from .context_messages import DONE, DONE_BODY, DROPPED, MAX_PIECE, PIECE, READY, SHOW, SIZE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

INTERRUPTED = 130


def serve(job: dict[str, Any], control: int) -> NoReturn:
    """Never returns: the process is killed, or user code ends it."""
    try:
        ContextInterpreter(_socket.socket(fileno=control)).run(job["env"])
    finally:
        os._exit(70)


class ContextInterpreter:
    def __init__(self, control: _socket.socket) -> None:
        self._control = control
        self._pid = os.getpid()
        self._null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        self._lock = _thread.allocate_lock()
        self._busy = False
        self._number = 0
        self._room = 0
        self._packages = ""

    def run(self, env: dict[str, str]) -> None:
        _ignore_interrupts()
        from . import matplotlib_figures, shell

        self.shell = shell.make(self)
        matplotlib_figures.prepare(self)
        # Last, so that no file of the user hides a module of the executor.
        sys.path.insert(0, "")
        sys.path[1:1] = child.search_path(env)
        self._packages = env.get(child.PACKAGES, "")
        os.environ.pop("ATOLL_EXECUTION_ID", None)
        child._reseed()
        self._send(READY)
        while True:
            number, job, descriptors = jobs.receive(self._control)
            status = self._execute(number, job, descriptors)
            self._send(DONE + DONE_BODY.pack(number, status))

    # One run

    def _execute(self, number: int, job: dict[str, Any], descriptors: list[int]) -> int:
        value = descriptors.pop()
        self._set_streams(descriptors)
        for fd in descriptors:
            os.close(fd)
        self._number, self._room = number, job["results_limit"]
        kept: dict[str, str | None] = {}
        status = 1
        try:
            self._change_packages(job["env"].pop(child.PACKAGES, self._packages))
            env = child.environment(job["env"])
            kept = {name: os.environ.get(name) for name in env}
            os.environ.update(env)
            child.add_user_site()
            self._busy = True
            signal.signal(signal.SIGINT, signal.default_int_handler)
            status = self._user_code(job["code"], value)
            _ignore_interrupts()
        except BaseException as error:  # noqa: BLE001 - an interrupt that came late, or user code
            _ignore_interrupts()
            status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        self._busy = False
        if os.getpid() != self._pid:
            # A fork of user code that has reached this point: it is not the context.
            os._exit(status)
        for name, text in kept.items():
            if text is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = text
        self._set_streams([self._null] * 3)
        os.close(value)
        return status

    def _change_packages(self, packages: str) -> None:
        """Replace the session's packages, which may have changed since the context was made."""
        old, self._packages = self._packages, packages
        if packages == old:
            return
        if old and old in sys.path:
            sys.path[sys.path.index(old)] = packages
        else:
            sys.path.insert(1, packages)
        for name, below in (("PYTHONPATH", ""), ("PATH", "/bin")):
            entries = os.environ.get(name, "").split(":")
            if old and old + below in entries:
                entries[entries.index(old + below)] = packages + below
            else:
                entries.insert(0, packages + below)
            os.environ[name] = ":".join(entry for entry in entries if entry)
        os.environ[child.PACKAGES] = packages

    def _set_streams(self, descriptors: list[int]) -> None:
        for number, fd in enumerate(descriptors):
            os.dup2(fd, number)
        # A new object: the buffer may hold unread input of an earlier run.
        stdin: Any = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
        sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]
        for name, number in (("stdout", 1), ("stderr", 2)):
            stream = getattr(sys, name)
            if stream is None or getattr(stream, "closed", False):
                raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
                setattr(sys, name, io.TextIOWrapper(raw, line_buffering=True))

    def _user_code(self, code: str, value: int) -> int:
        from . import matplotlib_figures

        error = self.shell.run(code)
        matplotlib_figures.flush(self, show=not isinstance(error, (KeyboardInterrupt, SystemExit)))
        if error is None:
            status = 0
        elif isinstance(error, SystemExit):
            status = child._exit_status(error)
        else:
            status = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
            self._report(error, value)
        return child._flush(status)

    def _report(self, error: BaseException, value: int) -> None:
        # As in `child`: all of this may run user code.
        name = type.__dict__["__name__"].__get__(type(error))
        lines = self.shell.traceback(error)
        message = ""
        try:
            message = str.__getitem__(str(error), slice(0, 10_000))
        except Exception:  # noqa: BLE001 - __str__ is user code
            pass
        report = child._failure("exception", message, name=name, traceback=lines[-50_000:])
        child._report(value, child.FAILURE, report)

    # Displays

    def show(self, kind: str, data: dict[Any, Any], metadata: Any = None) -> None:
        """Show a MIME bundle, as `display` or as the `result` of the last expression."""
        if not self._busy or os.getpid() != self._pid:
            return
        try:
            sys.stdout.flush()
        except Exception:  # noqa: BLE001 - it may be user code
            pass
        size = sum(len(item) for item in data.values() if isinstance(item, (str, bytes)))
        payload = b""
        if size <= self._room:
            bundle = {"type": kind, "data": _plain(data), "metadata": _json(metadata, {})}
            payload = minijson.dumps(bundle)
            size = len(payload)
        with self._lock:
            if size > self._room:
                self._send(DROPPED + SIZE.pack(self._number, size))
                return
            self._room -= size
            self._send(SHOW + SIZE.pack(self._number, size))
            for start in range(0, size, MAX_PIECE):
                self._send(PIECE + payload[start : start + MAX_PIECE])

    def _send(self, message: bytes) -> None:
        self._control.send(message)


def _ignore_interrupts() -> None:
    """By a handler: programs that user code starts would inherit SIG_IGN."""
    while True:
        try:
            signal.signal(signal.SIGINT, _nothing)
            return
        except KeyboardInterrupt:
            continue


def _nothing(number: int, frame: Any) -> None: ...


def _plain(data: dict[Any, Any]) -> dict[str, Any]:
    """The bundle as JSON: bytes in base64, and without values that cannot be encoded."""
    found: dict[str, Any] = {}
    for name, item in data.items():
        if isinstance(item, (bytes, bytearray)):
            import binascii

            item = binascii.b2a_base64(item, newline=False).decode("ascii")
        if isinstance(name, str) and item is not None:
            item = _json(item, None)
            if item is not None:
                found[name] = item
    return found


def _json(value: Any, otherwise: Any) -> Any:
    if isinstance(value, str):
        return value
    try:
        minijson.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return otherwise
    return otherwise if value is None else value
