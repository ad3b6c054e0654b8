"""
Several workers of one server: processes that accept from the same socket, each a whole replica.

The parent serves nothing. It starts the workers, starts one again that has died, and ends them all
when it is told to end; they end by themselves when it is gone. It has no threads and no event loop,
so that forking is safe at any time.
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

ENDING = (signal.SIGTERM, signal.SIGINT)
WATCHED = (*ENDING, signal.SIGCHLD)
LOOK_SECONDS = 0.1
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 10.0
"""Seconds before a worker that died is started again; twice as long each time it dies early."""
STEADY_SECONDS = 30.0
"""A worker that lived this long did not die early."""
KILL_MARGIN = 15.0
"""Seconds beyond its shutdown time-outs after which a worker that does not end is killed."""


def check(settings: Settings) -> None:
    if settings.workers > 1 and settings.redis_url is None:
        raise InvalidRequest(
            "Several workers need Redis to agree on who does what: set ATOLL_REDIS_URL, or use one "
            "worker.",
            code="workers_need_redis",
        )


class Ready:
    """A worker's end of the pipes to its parent."""

    def __init__(self, tell: int, parent: int) -> None:
        self._tell = tell
        self.parent = parent
        """Readable when the parent is gone."""

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
        """When it is to be started again."""
        self.ready = -1
        """Readable when it serves, or has died."""


class Workers:
    def __init__(self, settings: Settings, work: Callable[[Ready], None]) -> None:
        # Once for the requests and once for what they left behind.
        self._grace = 2 * settings.shutdown_timeout.total_seconds() + KILL_MARGIN
        self._work = work
        self._workers = [Worker(number) for number in range(settings.workers)]
        self._life: tuple[int, int] = os.pipe()

    def run(self, welcome: Callable[[], None]) -> int:
        """Until told to end; the exit code."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        try:
            for worker in self._workers:
                self._start(worker)
            for worker in self._workers:
                if self._told_to_end(worker):
                    return self._end(0)
                if not self._serves(worker):
                    # At the first start it is a mistake that starting again does not mend.
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
                log.error("worker.broke", worker=worker.number, exc_info=error)
            finally:
                # Not into the parent's code, which is not this process's to run.
                os._exit(code)
        os.close(write)
        worker.pid, worker.ready, worker.due = pid, read, None
        worker.started = time.monotonic()

    def _told_to_end(self, worker: Worker) -> bool:
        """Wait until a worker that was just started has something to tell, or we are to end."""
        while not select.select([worker.ready], [], [], LOOK_SECONDS)[0]:
            if signal.sigtimedwait(ENDING, 0) is not None:
                return True
        return False

    def _serves(self, worker: Worker) -> bool:
        """Wait for a worker that was just started."""
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
            self._bury()
            for worker in self._workers:
                if worker.due is not None and worker.due <= time.monotonic():
                    self._start_again(worker)

    def _start_again(self, worker: Worker) -> None:
        try:
            self._start(worker)
        except OSError as error:
            # No memory or no descriptor for it; the others serve.
            log.error("worker.not_started", worker=worker.number, error=str(error))
            worker.due = time.monotonic() + LONGEST_PAUSE

    def _next_due(self) -> float:
        due = [worker.due for worker in self._workers if worker.due is not None]
        return max(0.0, min(due) - time.monotonic()) if due else 3600.0

    def _bury(self) -> None:
        """Those that have died are started again, the later the sooner they died."""
        for worker in self._workers:
            if worker.pid == 0:
                continue
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid == 0:
                continue
            now = time.monotonic()
            steady = now - worker.started >= STEADY_SECONDS
            worker.pause = FIRST_PAUSE if steady else min(worker.pause * 2, LONGEST_PAUSE)
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
        """Ask all to end, and see to it."""
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
