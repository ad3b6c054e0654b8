"""
The way from ordinary code to the asynchronous client: one event loop in a thread of its own.

A call may come from any thread, also from one that has a running event loop. Functions given as
arguments run in the thread of the caller, who has nothing else to do meanwhile. A call that is
interrupted (Ctrl-C) is cancelled, and has ended when the interrupt goes on.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401 - its hook must come before ours, which runs first
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
        """What `function` gives when it is awaited on the loop."""
        if self._inside():
            raise RuntimeError("Use AsyncAtoll inside the event loop of an Atoll.")
        call: _Call[T] = _Call(self._schedule)

        async def main() -> T:
            return await function(
                *map(call.here, args), **{name: call.here(arg) for name, arg in kwargs.items()}
            )

        return call.result(main)

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """The items, one by one; an iteration that is given up is closed on the loop too."""
        try:
            while (item := self.call(_next, items)) is not _END:
                yield item
        finally:
            self._release(items)

    @contextmanager
    def context(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        value = self.call(manager.__aenter__)
        try:
            yield value
        except BaseException as error:
            # An interrupt of this thread would end the loop's thread, were it raised there.
            told = error if isinstance(error, Exception) else asyncio.CancelledError()
            if not self.call(manager.__aexit__, type(told), told, told.__traceback__):
                raise
        else:
            self.call(manager.__aexit__, None, None, None)

    def stop(self, timeout: float | None = None) -> None:
        """End the loop and what still runs on it; `timeout` is how long to wait for that."""
        with self._lock:
            self._closed = True
            loop, thread, self._loop = self._loop, self._thread, None
            if loop is None or thread is None or self._process != os.getpid():
                return
            loop.call_soon_threadsafe(loop.stop)
        if not self._inside():
            thread.join(timeout)

    def _schedule(self, function: Callable[..., object], *args: Any) -> None:
        # Under the lock, so that nothing is scheduled behind the end of the loop and lost there.
        with self._lock:
            if self._closed:
                raise RuntimeError("This Atoll is closed.")
            if self._process != os.getpid():
                raise RuntimeError("This Atoll belongs to the parent process; make one here.")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # A daemon, stopped when nobody can call any more: it must not keep a program alive.
                self._thread = threading.Thread(
                    target=_live, args=(self._loop,), name="atoll", daemon=True
                )
                self._thread.start()
                weakref.finalize(self, _stop, self._loop).atexit = False
                _open.add(self)
            self._loop.call_soon_threadsafe(function, *args)

    def _inside(self) -> bool:
        return self._thread is threading.current_thread()

    def _release(self, items: Any) -> None:
        if self._closed or sys.is_finalizing() or self._process != os.getpid():
            return
        if self._inside():  # the garbage collector runs in any thread
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
            with suppress(RuntimeError):  # closed: there is nothing left to wait for
                self._schedule(self._cancel)
                while self._jobs.get() is not None:
                    pass
            raise
        assert self._task is not None
        if self._task.cancelled():
            raise RuntimeError("This Atoll was closed during the call.")
        error = self._task.exception()
        if isinstance(error, AtollError):
            # Its message is all that matters: without the frames of the loop's thread.
            raise error.with_traceback(None)
        return self._task.result()

    def here(self, argument: Any) -> Any:
        """A function as the loop can call it: run by the waiting thread, and awaited."""
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
        # In the loop's order: either the task is there, or it will never start. Of one that is done
        # the word may have been on its way out of the queue when the interrupt came.
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


def _live(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


def _stop(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(RuntimeError):  # closed already
        loop.call_soon_threadsafe(loop.stop)


def _stop_all() -> None:
    for portal in list(_open):
        portal.stop(_EXIT_TIMEOUT)


# What nobody closed is closed while threads can still be started: an embedded server needs them to
# end in good order, and `atexit` comes too late for that.
getattr(threading, "_register_atexit", atexit.register)(_stop_all)
