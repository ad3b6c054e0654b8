"""
Several workers of one server: processes that accept from the same socket, each a replica.

The parent serves no requests. It starts the workers, restarts those that die, and stops all of them
on SIGTERM; workers exit when their parent has died. The parent has no threads and no event loop, so
that it can fork at any time.
"""

from __future__ import annotations

import os
import select
import signal
import time
from typing import TYPE_CHECKING

import structlog

from atoll.errors import AtollError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.settings import Settings

log = structlog.get_logger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
WATCHED = (*STOP_SIGNALS, signal.SIGCHLD)
POLL_INTERVAL = 0.1
FIRST_PAUSE, MAX_PAUSE = 1.0, 10.0
"""Seconds before a dead worker is restarted; doubled each time it dies early."""
STEADY_SECONDS = 30.0
"""A worker that ran this long did not die early."""
KILL_MARGIN = 15.0
"""Seconds after the shutdown time-outs when a worker that has not ended is killed."""


def check(settings: Settings) -> None:
    if settings.workers > 1 and settings.redis_url is None:
        raise InvalidRequest(
            "Several workers need Redis to coordinate their work: set ATOLL_REDIS_URL, or use one "
            "worker.",
            code="workers_need_redis",
        )


class Ready:
    """A worker's end of the pipes to its parent."""

    def __init__(self, tell: int, parent: int) -> None:
        self._tell = tell
        self.parent = parent
        """Readable when the parent has died."""

    def __call__(self) -> None:
        os.write(self._tell, b"1")
        os.close(self._tell)


class Worker:
    def __init__(self, number: int) -> None:
        self.number = number
        self.pid = 0
        self.started = 0.0
        self.pause = FIRST_PAUSE
        self.due: float | None = None
        """When to restart it."""
        self.ready = -1
        """Readable when it serves, or has died."""


class Workers:
    def __init__(self, settings: Settings, work: Callable[[Ready], None]) -> None:
        # Once for open requests and once for background work.
        self._grace = 2 * settings.shutdown_timeout.total_seconds() + KILL_MARGIN
        self._work = work
        self._workers = [Worker(number) for number in range(settings.workers)]
        self._life: tuple[int, int] = os.pipe()

    def run(self, welcome: Callable[[], None]) -> int:
        """Run until a stop signal; the exit code."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        try:
            for worker in self._workers:
                self._start(worker)
            for worker in self._workers:
                if self._is_stopped(worker):
                    return self._end(0)
                if not self._serves(worker):
                    # A failure of the first start is permanent, such as an invalid setting.
                    return self._end(self._status(worker))
            welcome()
            return self._watch()
        finally:
            for fd in self._life:
                os.close(fd)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _start(self, worker: Worker) -> None:
        read, write = os.pipe()
        try:
            pid = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            raise
        if pid == 0:
            code = 70
            try:
                os.close(read)
                os.close(self._life[1])
                signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
                self._work(Ready(write, self._life[0]))
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
            except AtollError as error:
                code = 1
                log.error("worker.ended", code=error.code, error=error.message)
            except BaseException as error:
                log.error("worker.failed", worker=worker.number, exc_info=error)
            finally:
                # Never return into the parent's code.
                os._exit(code)
        os.close(write)
        worker.pid, worker.ready, worker.due = pid, read, None
        worker.started = time.monotonic()

    def _is_stopped(self, worker: Worker) -> bool:
        """Wait until a new worker is ready or has died; true on a stop signal before that."""
        while not select.select([worker.ready], [], [], POLL_INTERVAL)[0]:
            if signal.sigtimedwait(STOP_SIGNALS, 0) is not None:
                return True
        return False

    def _serves(self, worker: Worker) -> bool:
        """Wait for a new worker; false if it died."""
        try:
            return os.read(worker.ready, 1) == b"1"
        finally:
            os.close(worker.ready)
            worker.ready = -1

    def _watch(self) -> int:
        while True:
            received = signal.sigtimedwait(WATCHED, self._next_due())
            if received is not None and received.si_signo != signal.SIGCHLD:
                return self._end(0)
            self._reap()
            for worker in self._workers:
                if worker.due is not None and worker.due <= time.monotonic():
                    self._start_again(worker)

    def _start_again(self, worker: Worker) -> None:
        try:
            self._start(worker)
        except OSError as error:
            # No memory or file descriptor is left; the other workers keep serving.
            log.error("worker.not_started", worker=worker.number, error=str(error))
            worker.due = time.monotonic() + MAX_PAUSE

    def _next_due(self) -> float:
        due = [worker.due for worker in self._workers if worker.due is not None]
        return max(0.0, min(due) - time.monotonic()) if due else 3600.0

    def _reap(self) -> None:
        """Schedule restarts of dead workers, later for those that died early."""
        for worker in self._workers:
            if worker.pid == 0:
                continue
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid == 0:
                continue
            now = time.monotonic()
            steady = now - worker.started >= STEADY_SECONDS
            worker.pause = FIRST_PAUSE if steady else min(worker.pause * 2, MAX_PAUSE)
            worker.pid, worker.due = 0, now + worker.pause
            if worker.ready >= 0:
                os.close(worker.ready)
                worker.ready = -1
            code = os.waitstatus_to_exitcode(status)
            log.warning("worker.died", worker=worker.number, code=code, again_in=worker.pause)

    def _status(self, worker: Worker) -> int:
        _, status = os.waitpid(worker.pid, 0)
        worker.pid = 0
        return os.waitstatus_to_exitcode(status) or 1

    def _end(self, code: int) -> int:
        """Send SIGTERM to all, and SIGKILL to those that do not end in time."""
        deadline = time.monotonic() + self._grace
        for worker in self._workers:
            if worker.pid:
                os.kill(worker.pid, signal.SIGTERM)
        while any(worker.pid for worker in self._workers):
            signal.sigtimedwait([signal.SIGCHLD], max(0.0, deadline - time.monotonic()))
            for worker in self._workers:
                if worker.pid and time.monotonic() >= deadline:
                    log.error("worker.killed", worker=worker.number)
                    os.kill(worker.pid, signal.SIGKILL)
                    os.waitpid(worker.pid, 0)
                    worker.pid = 0
                elif worker.pid and os.waitpid(worker.pid, os.WNOHANG)[0]:
                    worker.pid = 0
        return code
