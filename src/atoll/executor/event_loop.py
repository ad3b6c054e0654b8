"""
A small event loop: file descriptors, timers, and work for the end of a turn.

It exists because importing asyncio would take longer than the rest of the start. An exception of a
callback is written to stderr and ends only that callback, because PID 1 runs the loop.
"""

from __future__ import annotations

import _heapq as heapq
import select
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
MAX_TRACEBACKS = 100
"""A callback that fails in every turn must not fill the log."""


class Timer:
    __slots__ = ("call", "due")

    def __init__(self, due: float, call: Callable[[], None] | None) -> None:
        self.due = due
        self.call = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._count = 0
        self._end_of_turn: list[Callable[[], None]] = []
        self._tracebacks = 0
        self.running = True

    def add(self, fd: int, mask: int, call: Callable[[int], None]) -> None:
        self._callbacks[fd] = call
        self._epoll.register(fd, mask)

    def change(self, fd: int, mask: int) -> None:
        self._epoll.modify(fd, mask)

    def remove(self, fd: int) -> None:
        """
        Call this before the descriptor is closed: a forked child that still has it keeps the epoll
        entry alive.
        """
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(time.monotonic() + seconds, call)
        self._count += 1
        heapq.heappush(self._timers, (timer.due, self._count, timer))
        return timer

    def at_end_of_turn(self, call: Callable[[], None]) -> None:
        self._end_of_turn.append(call)

    def close(self) -> None:
        self._epoll.close()

    def run(self) -> None:
        timers, callbacks = self._timers, self._callbacks
        while self.running:
            while timers and timers[0][2].call is None:
                heapq.heappop(timers)
            wait = -1.0 if not timers else max(0.0, timers[0][0] - time.monotonic())
            for fd, mask in self._epoll.poll(wait):
                call = callbacks.get(fd)
                if call is not None:
                    try:
                        call(mask)
                    except Exception:  # noqa: BLE001 - see the module docstring
                        self._print_exception()
            now = time.monotonic() if timers else 0.0
            while timers and timers[0][0] <= now:
                timer = heapq.heappop(timers)[2]
                due, timer.call = timer.call, None  # Avoids a reference cycle.
                if due is not None:
                    try:
                        due()
                    except Exception:  # noqa: BLE001 - see the module docstring
                        self._print_exception()
            while self._end_of_turn:
                pending, self._end_of_turn = self._end_of_turn, []
                for work in pending:
                    try:
                        work()
                    except Exception:  # noqa: BLE001 - see the module docstring
                        self._print_exception()

    def _print_exception(self) -> None:
        self._tracebacks += 1
        if self._tracebacks <= MAX_TRACEBACKS:
            sys.__excepthook__(*sys.exc_info())
