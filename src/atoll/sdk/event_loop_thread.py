"""
Calls the asynchronous client from synchronous code, on an event loop in its own thread.

Any thread may call, including one with a running event loop. Callbacks run in the thread of the
caller, which is blocked meanwhile. An interrupt (Ctrl-C) cancels the call, waits for its end, and
then propagates.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401 - its exit hook must be registered before ours, which then runs first
import contextvars
import os
import sys
import threading
import weakref
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from atoll.errors import AtollError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
    from contextlib import AbstractAsyncContextManager

P = ParamSpec("P")
T = TypeVar("T")
_END: Any = object()
_EXIT_TIMEOUT = 10.0

_open: weakref.WeakSet[EventLoopThread] = weakref.WeakSet()


class EventLoopThread:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._closed = False

    def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Await `function(*args, **kwargs)` on the loop and return its result."""
        if self._on_own_thread():
            raise RuntimeError(
                "Atoll cannot be called on its own event loop. Use AsyncAtoll there."
            )
        call: _Call[T] = _Call(self._schedule)

        async def main() -> T:
            return await function(
                *map(call.relayed, args),
                **{name: call.relayed(arg) for name, arg in kwargs.items()},
            )

        return call.result(main)

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """Iterate on the loop. An abandoned iteration is closed on the loop as well."""
        try:
            while (item := self.call(_next, items)) is not _END:
                yield item
        finally:
            self._close_iteration(items)

    @contextmanager
    def context(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        value = self.call(manager.__aenter__)
        try:
            yield value
        except BaseException as error:
            # Raised on the loop, an interrupt of this thread would end the loop's thread.
            passed = error if isinstance(error, Exception) else asyncio.CancelledError()
            if not self.call(manager.__aexit__, type(passed), passed, passed.__traceback__):
                raise
        else:
            self.call(manager.__aexit__, None, None, None)

    def stop(self, timeout: float | None = None) -> None:
        """Stop the loop, cancel its tasks, and wait at most `timeout` seconds for its thread."""
        with self._lock:
            self._closed = True
            loop, thread, self._loop = self._loop, self._thread, None
            if loop is None or thread is None or self._process != os.getpid():
                return
            loop.call_soon_threadsafe(loop.stop)
        if not self._on_own_thread():
            thread.join(timeout)

    def _schedule(self, function: Callable[..., object], *args: Any) -> None:
        # Under the lock: nothing may be scheduled after the loop has stopped.
        with self._lock:
            if self._closed:
                raise RuntimeError("This client is closed.")
            if self._process != os.getpid():
                raise RuntimeError(
                    "This client belongs to the parent process. Create a new one after a fork."
                )
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # A daemon thread, so that it does not keep the program alive.
                self._thread = threading.Thread(
                    target=_run_loop, args=(self._loop,), name="atoll", daemon=True
                )
                self._thread.start()
                weakref.finalize(self, _stop, self._loop).atexit = False
                _open.add(self)
            self._loop.call_soon_threadsafe(function, *args)

    def _on_own_thread(self) -> bool:
        return self._thread is threading.current_thread()

    def _close_iteration(self, items: Any) -> None:
        if self._closed or sys.is_finalizing() or self._process != os.getpid():
            return
        if self._on_own_thread():  # The garbage collector runs in any thread.
            self._schedule(asyncio.ensure_future, items.aclose())
        else:
            self.call(items.aclose)


class _Call(Generic[T]):
    """A task on the loop, and the thread that waits for it."""

    def __init__(self, schedule: Callable[..., None]) -> None:
        self._schedule = schedule
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._task: asyncio.Task[T] | None = None
        self._cancelled = False

    def result(self, main: Callable[[], Coroutine[None, None, T]]) -> T:
        context = contextvars.copy_context()
        try:
            self._schedule(self._start, main, context)
            while (job := self._jobs.get()) is not None:
                job()
        except BaseException:
            with suppress(RuntimeError):  # Closed: there is nothing left to wait for.
                self._schedule(self._cancel)
                while self._jobs.get() is not None:
                    pass
            raise
        assert self._task is not None
        if self._task.cancelled():
            raise RuntimeError("This client was closed during the call.")
        error = self._task.exception()
        if isinstance(error, AtollError):
            # Without the frames of the loop's thread, which do not help the caller.
            raise error.with_traceback(None)
        return self._task.result()

    def relayed(self, argument: Any) -> Any:
        """Wrap a callback, so that the loop runs it in the waiting thread and awaits it."""
        if not callable(argument) or isinstance(argument, type):
            return argument

        def relay(*args: Any) -> asyncio.Future[Any]:
            done = asyncio.get_running_loop().create_future()

            def job() -> None:
                self._schedule(_settle, done, argument(*args))

            self._jobs.put(job)
            return done

        return relay

    def _start(
        self, main: Callable[[], Coroutine[None, None, T]], context: contextvars.Context
    ) -> None:
        if not self._cancelled:
            self._task = asyncio.get_running_loop().create_task(main(), context=context)
            self._task.add_done_callback(lambda _: self._jobs.put(None))

    def _cancel(self) -> None:
        # On the loop, so either the task exists or it will never start. If it is done, its
        # notification may have been lost to the interrupt; so send another one.
        self._cancelled = True
        if self._task is None or self._task.done():
            self._jobs.put(None)
        else:
            self._task.cancel()


def _settle(done: asyncio.Future[Any], value: Any) -> None:
    if not done.done():
        done.set_result(value)


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items, _END)


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # Closed already.
        loop.call_soon_threadsafe(loop.stop)


def _stop_all() -> None:
    for portal in list(_open):
        portal.stop(_EXIT_TIMEOUT)


# Close forgotten clients while threads can still be started. An embedded server needs threads to
# shut down, and `atexit` hooks run too late for that.
getattr(threading, "_register_atexit", atexit.register)(_stop_all)
