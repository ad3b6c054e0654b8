"""
The supervisor: PID 1 of the instance, which owns the link and runs no user code.

It cannot be traced or read by its peers (it is not dumpable), its descriptors are closed to them,
and the kernel drops their signals to PID 1. When it exits, the kernel kills every process of the
namespace.
"""

from __future__ import annotations

import _operator
import _signal as signal  # type: ignore[import-not-found]
import os
import sys

from ..protocol import frames
from . import syscalls
from .callbacks import Callbacks
from .connection import Connection, Refusal, Stream
from .contexts import Contexts
from .event_loop import READ, Loop
from .files.outputs import Outputs
from .files.paths import ROOT, FileError
from .files.requests import FileRequests
from .files.workspace import Workspace
from .freeze import Freezer
from .interpreter.zygote import STORAGE_BLOCK
from .interpreter.zygote_client import ZygoteClient, ZygoteObserver
from .listener import Listener
from .runs.approvals import Approvals
from .runs.journal import Journal
from .runs.limit_enforcement import LimitWatch
from .runs.messages import Messages
from .runs.process_table import ProcessTable
from .runs.requests import RunRequests
from .runs.run import Run
from .runs.runs import Runs
from .runs.user_socket import UserSocket
from .unattended import Unattended
from .workers import Workers

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    import ssl
    from typing import Any, Callable

READY = b"ready\n"
BLOCKED = signal.valid_signals() - {signal.SIGCHLD}
EXIT_TERMINATED = 143
SHUTDOWN_SECONDS = 8.0
"""Seconds that the executor waits at shutdown for runs to end and results to be sent."""
SHUTDOWN_CHECK_INTERVAL = 0.02
QUIET_CHECK_INTERVAL = 0.002
MAX_UNGREETED = 16
"""Connections at a time without an accepted hello: user code may open any number over TCP."""
CHANGING = frozenset({"write", "mkdir", "move", "remove", "chmod", "populate"})
"""Requests by which PID 1 itself changes files, even while user code is frozen."""


class Supervisor(ZygoteObserver):
    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._loop = Loop()
        self._root: str = config.get("root", ROOT)
        workspace = Workspace(self._root)
        own_processes: set[int] = set()
        self._table = ProcessTable(self._loop, own_processes)
        self._zygote = ZygoteClient(self._loop, config, own_processes)
        self._callbacks = Callbacks(self._loop, config.get("callback"), own_processes)
        self._outputs = Outputs(self._loop, workspace)
        journal = Journal(config.get("journal_fds", ()))
        self._runs = Runs(
            self._loop, self._zygote, self._table, self._outputs, journal, self._callbacks
        )
        self._limits = LimitWatch(self._loop, self._runs, self._root)
        self._contexts = Contexts(self._loop, self._runs, self._zygote, self._limits.configure)
        self._zygote.subscribe(self, self._runs, self._contexts)
        self._user_socket = UserSocket(self._loop, self._runs)
        self._approvals = Approvals(self._loop, self._runs, self._user_socket)
        self._messages = Messages(self._loop, self._runs, self._user_socket)
        self._freezer = Freezer(self._loop, lambda: frozenset((self._callbacks.pid,)))
        self._workers = Workers(self._loop, workspace.root, own_processes)
        self._connections: list[Connection] = []
        self._listener = Listener(
            self._loop,
            config.get("peer"),
            self._admit,
            loopback=bool(config.get("loopback")),
        )
        self._tls: ssl.SSLContext | None = None
        # None for an ephemeral instance, which exits with its owner.
        limit = config.get("unattended")
        self._unattended = (
            None if limit is None else Unattended(self._loop, limit, lambda: self._exit(0))
        )
        self._exiting = False
        self._quiet = False
        self._session_version = 0
        """The latest version (`edition`) of the session that a control plane has announced."""
        self._operations = self._make_operations(workspace)

    def _make_operations(
        self, workspace: Workspace
    ) -> dict[str, Callable[[Stream, dict[str, Any]], None]]:
        files = FileRequests(
            workspace, self._outputs.scanner, self._limits, self._workers, self._freezer.disturb
        )

        def transfer(stream: Stream, request: dict[str, Any]) -> None:
            from .files.checkpoint_requests import (
                CheckpointRequests,  # Most waiting instances never need it.
            )

            CheckpointRequests(self._loop, workspace, self._freezer).start(stream, request)

        operations = {
            "run": self._run,
            "release": self._zygote.release,
            "shutdown": self._shutdown,
            **RunRequests(self._runs, self._zygote).operations,
            **self._approvals.operations,
            **self._messages.operations,
            **files.operations,
            **self._contexts.operations,
            "context_create": self._create_context,
            "edition": self._announce_version,
            "scan": transfer,
            "collect": transfer,
            "populate": transfer,
            "quiet": self._kill_user_code,
            "memory_limit": self._report_memory_limit,
            "detach": self._detach,
        }
        if self._unattended is not None:
            operations["unattended"] = self._unattended.configure
        return operations

    def run(self, listener: _socket.socket) -> None:
        if "inside" in self._config:
            # Bind the name before the zygote imports the template's modules, so that none of them
            # can.
            self._user_socket.listen(self._config["inside"])
        self._zygote.start()
        # After the fork, so that the zygote does not have a copy of what is read here.
        self._runs.restore()
        self._outputs.remove_remains()
        self._catch_child_exits()
        self._catch_termination()
        if self._unattended is not None:
            self._unattended.disconnected()
        ready = self._config.get("ready_fd")
        if "key_fd" in self._config:
            from . import tls  # Only executors that are reached over TCP have it.

            # After the fork of the zygote, which must not have a copy of the key.
            os.write(self._config["ready_fd"], tls.ASK)
            self._tls = tls.server_context(tls.read_key(self._config["key_fd"]))
            os.close(self._config["key_fd"])
        self._listener.listen(listener)
        if ready is not None:
            os.write(ready, READY)
            os.close(ready)
        owner = self._config.get("owner_fd")
        if owner is not None:
            self._loop.add(owner, READ, lambda mask: _exit_with_owner(owner))
        self._loop.run()

    # Connections

    def _admit(self, socket: _socket.socket) -> None:
        waiting = [one for one in self._connections if not one.greeted]
        if len(waiting) >= MAX_UNGREETED:
            waiting[0].close()
        self._connections.append(
            Connection(self._loop, self._secured(socket), self._hello, self._request, self._closed)
        )

    def _secured(self, socket: _socket.socket) -> _socket.socket:
        """The socket, behind TLS if the executor is reached over TCP."""
        if self._tls is None:
            return socket
        from .tls import TlsSocket

        return TlsSocket(socket, self._tls)  # type: ignore[return-value]

    def _closed(self, connection: Connection) -> None:
        self._connections.remove(connection)
        attended = any(other.greeted for other in self._connections)
        if connection.greeted and not attended and self._unattended is not None:
            self._unattended.disconnected()

    def _hello(self, connection: Connection, hello: dict[str, Any]) -> bool:
        """Answer a hello; returns whether the connection may send requests."""
        if not self._is_authentic(hello.get("token")):
            value = {"code": "unauthenticated", "message": "the token is not the instance's"}
            connection.write(frames.encode_json(0, frames.ERROR, value))
            return False
        if frames.VERSION not in hello.get("versions", ()):
            message = "this executor speaks version %d" % frames.VERSION
            value = {"code": "version_mismatch", "message": message}
            connection.write(frames.encode_json(0, frames.ERROR, value))
            return False
        greeting = {
            "version": frames.VERSION,
            "features": frames.FEATURES,
            "python": sys.version.split()[0],
            "zygote": self._zygote.pid,
            "runs": self._runs.summary(),
        }
        connection.write(frames.encode_json(0, frames.HELLO, greeting))
        if self._unattended is not None:
            self._unattended.connected()
        return True

    def _is_authentic(self, token: object) -> bool:
        """Whether the token is the control plane's; any is if the configuration has none."""
        if "token_digest" in self._config:
            # User code that finds the digest in its memory cannot connect with it.
            import hashlib

            if not isinstance(token, str):
                return False
            token = hashlib.sha256(token.encode()).hexdigest()
            return is_same_token(self._config["token_digest"], token)
        expected = self._config.get("token")
        return expected is None or is_same_token(expected, token)

    def _request(self, stream: Stream, request: dict[str, Any]) -> None:
        operation = self._operations.get(request.get("op", ""))
        try:
            if operation is None:
                raise Refusal(
                    "unsupported", "this executor has no operation %r" % request.get("op")
                )
            if request["op"] in CHANGING:
                self._freezer.disturb()
            operation(stream, request)
        except (Refusal, FileError) as error:
            stream.error(error.code, str(error))
        except OSError as error:
            stream.error("executor_error", str(error))
        except ImportError as error:
            # The image's interpreter was built without a module of the standard library.
            stream.error("unsupported", str(error))
        except (KeyError, TypeError, ValueError) as error:
            stream.error("bad_request", "%s: %s" % (type(error).__name__, error))

    def zygote_started(self, pid: int) -> None:
        event = frames.encode_json(0, frames.EVENT, {"event": "zygote", "pid": pid})
        for connection in self._connections:
            connection.write(event)

    def zygote_ready(self) -> None:
        self._callbacks.instance_ready()

    # Runs

    def _run(self, stream: Stream, request: dict[str, Any]) -> None:
        known = self._runs.get(request["id"])
        if known is not None:
            known.log.follow(stream, 0)
            return
        if self._runs.is_acknowledged(request["id"]):
            raise Refusal("run_is_over", "run %s has ended and was acknowledged" % request["id"])
        if self._exiting or self._quiet:
            raise Refusal("leaving", "this executor is shutting down")
        self._check_version(request)
        active, capacity = self._runs.active(), request.get("capacity")
        if capacity and len(active) >= capacity:
            # Left by a replica that was lost; the one that sent this request does not know of it.
            raise Refusal("busy", active[0].id)
        self._limits.configure(request["watch"])
        context = self._contexts.check(request["context"]) if request.get("context") else None
        run = Run(request, self._loop)
        if context is not None:
            self._contexts.begin(context, run)
        elif self._zygote.accepts_jobs:
            self._runs.hand_over(run)
        self._runs.enter(run, stream)
        self._zygote.adjust_children()

    def _check_version(self, request: dict[str, Any]) -> None:
        """Refuse a request that was made from an older version of the session than is known."""
        version = int(request.get("edition", self._session_version))
        if version < self._session_version:
            raise Refusal("stale", "the session is at edition %d" % self._session_version)
        self._session_version = version

    def _announce_version(self, stream: Stream, request: dict[str, Any]) -> None:
        version = int(request["edition"])
        if not request.get("reset"):
            version = max(self._session_version, version)
        self._session_version = version
        stream.end({})

    def _create_context(self, stream: Stream, request: dict[str, Any]) -> None:
        self._check_version(request)
        self._contexts.operations["context_create"](stream, request)

    def _report_memory_limit(self, stream: Stream, request: dict[str, Any]) -> None:
        from .runs.memory_limit import memory_limit  # Few instances ever need it.

        stream.end({"bytes": memory_limit()})

    # Children of PID 1

    def _catch_child_exits(self) -> None:
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        # Only the signal handler writes to the pipe; one byte is enough, so a full pipe is fine.
        self._loop.add(read, READ, lambda mask: self._reap(read))

    def _reap(self, wake: int) -> None:
        os.read(wake, 4096)
        self._zygote.poll_taken()
        if not self._freezer.wanted:
            self._zygote.kill_if_stopped()
        while True:
            try:
                pid, status, usage = os.wait3(os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._table.background.pop(pid, None)
            self._workers.child_exited(pid)
            used = {
                "cpu": usage.ru_utime + usage.ru_stime,
                "peak": usage.ru_maxrss * 1024,
                "read": usage.ru_inblock * STORAGE_BLOCK,
                "written": usage.ru_oublock * STORAGE_BLOCK,
            }
            self._runs.child_exited(pid, status, used)
            self._contexts.child_exited(pid, status, used)

    # Shutdown, and detaching of control planes

    def _kill_user_code(self, stream: Stream, request: dict[str, Any]) -> None:
        """
        Kill all user code and refuse new runs, before a checkpoint of the workspace is taken. Runs
        end with the reason `shutdown`, not with a signal.
        """
        self._quiet = True
        self._end_runs()
        if os.getpid() == 1:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                pass  # No other process exists.
        stream.end({})
        checks = int(SHUTDOWN_SECONDS / QUIET_CHECK_INTERVAL)
        self._close_others_when_sent(stream.connection, checks)

    def _close_others_when_sent(self, kept: Connection, checks: int) -> None:
        """Close all other connections once they have received how their runs ended."""
        if checks > 0 and not self._all_sent():
            self._loop.after(
                QUIET_CHECK_INTERVAL, lambda: self._close_others_when_sent(kept, checks - 1)
            )
            return
        self._close_others(kept)

    def _close_others(self, kept: Connection) -> None:
        for connection in list(self._connections):
            if connection is not kept:
                connection.close()

    def _detach(self, stream: Stream, request: dict[str, Any]) -> None:
        """
        Close all other connections, so that other replicas read the session's record again. Runs
        continue, and their output stays in their logs.
        """
        self._close_others(stream.connection)
        stream.end({})

    def _shutdown(self, stream: Stream, request: dict[str, Any]) -> None:
        stream.end({})
        self._exit(0)

    def _catch_termination(self) -> None:
        """
        Exit on SIGTERM from outside the namespace. From inside, user code may send it. With
        `termination_grace`, exit only so many seconds later: a control plane takes a checkpoint
        meanwhile, and then ends the executor.
        """
        # Blocks all but the one with a handler: gVisor does not drop the others for PID 1.
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        descriptor = syscalls.signal_descriptor(signal.SIGTERM)

        def terminated(mask: int) -> None:
            if syscalls.is_from_outside(os.read(descriptor, 128)) or os.getpid() != 1:
                grace = self._config.get("termination_grace", 0.0)
                self._loop.after(grace, lambda: self._exit(EXIT_TERMINATED))

        self._loop.add(descriptor, READ, terminated)

    def _exit(self, status: int) -> None:
        """End all runs, send their results, and exit."""
        if self._exiting:
            return
        self._exiting = True
        self._end_runs()
        self._exit_when_sent(status, int(SHUTDOWN_SECONDS / SHUTDOWN_CHECK_INTERVAL))

    def _exit_when_sent(self, status: int, checks: int) -> None:
        if checks <= 0 or self._all_sent():
            os._exit(status)
        self._loop.after(SHUTDOWN_CHECK_INTERVAL, lambda: self._exit_when_sent(status, checks - 1))

    def _end_runs(self) -> None:
        self._approvals.shut_down()
        self._messages.shut_down()
        for run in self._runs.active():
            self._runs.end(run, "shutdown", 0.0)

    def _all_sent(self) -> bool:
        """Whether no run is active and no connection has anything left to send."""
        sent = all(connection.flushed for connection in self._connections)
        return sent and not self._runs.active()


def _exit_with_owner(owner: int) -> None:
    if not os.read(owner, 4096):
        os._exit(0)  # The owner has exited, and no other process may use this instance.


def is_same_token(token: str, given: object) -> bool:
    """Compares in constant time."""
    return isinstance(given, str) and _operator._compare_digest(token.encode(), given.encode())
