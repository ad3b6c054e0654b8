"""
The local side of a console: the terminal in raw mode, or piped stdin and stdout.

All keys go to the program, including Ctrl-C. Only Ctrl-P Ctrl-Q is handled here: it detaches and
leaves the program running. The terminal is restored in any case.
"""

import asyncio
import os
import re
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from atoll.cli import exit_codes, output

if TYPE_CHECKING:
    from atoll.sdk.consoles import AsyncConsole
    from atoll.sdk.values import ConsoleExit

PIECE = 32 * 1024
CTRL_P, CTRL_Q = b"\x10", b"\x11"
INTERRUPT = b"\x03"
_NOTE_DELAY = 0.5
"""Seconds before a note explains that the session is busy."""
_ALTERNATE = b"\x1b[?1049"
_RESET = b"\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1l\x1b>\x1b[?25h\x1b[0m"
"""Resets mouse, paste and key modes, shows the cursor, and resets colours."""

_IGNORED_ERRORS = frozenset({"execution_not_running", "stdin_closed"})
"""Input arrived after the end of the program, like a write to a broken pipe."""

FILTER_SECONDS = 2.0
"""How long after the first replayed output replies are filtered."""
_MAX_REPLY = 4096
_REPLY = re.compile(
    rb"\x1b\[\??\d+;\d+(;\d+)?R"  # cursor position
    rb"|\x1b\[[?>=][\d;]*c"  # device attributes
    rb"|\x1b\[\??[\d;]+\$y"  # modes
    rb"|\x1b\[\??[\d;]*n"  # status
    rb"|\x1b\[\d+;\d+;\d+t"  # size
    rb"|\x1b\[\?\d+u"  # keyboard protocol
    rb"|\x1b\]\d+;[^\x07\x1b]*(?:\x07|\x1b\\)"  # colours
    rb"|\x1bP[\d>!][^\x1b]*\x1b\\"  # version and settings
)
_BEGUN = re.compile(rb"\x1b(?:\[[?>=\d][\d;]*\$?|\]\d[^\x07\x1b]*\x1b?|P[\d>!][^\x1b]*\x1b?)\Z")
"""The beginning of an incomplete reply. Keys are sent whole, and none begins like this."""


class Detached(Exception):
    """Ctrl-P Ctrl-Q was typed."""


class DetachKeys:
    """Detects Ctrl-P Ctrl-Q. Holds a Ctrl-P back until the next key."""

    def __init__(self) -> None:
        self._held = False

    def filter(self, data: bytes) -> bytes:
        """The keys to send. The detach keys raise `Detached`; keys before them are dropped."""
        passed = bytearray()
        for key in data:
            byte = bytes((key,))
            if self._held and byte == CTRL_Q:
                raise Detached
            if self._held:
                passed += CTRL_P
            self._held = byte == CTRL_P
            if not self._held:
                passed += byte
        return bytes(passed)


class ReplyFilter:
    """
    Filters replies of the terminal out of typed input, however they are split.

    Replayed output may contain terminal queries of programs that have ended. The terminal answers
    them, and the answers would be typed into the current program. Replies are recognized by their
    form, which some terminals also use for Shift-F3, so the filter is only active shortly after the
    replay.
    """

    def __init__(self) -> None:
        self._held = b""

    def filter(self, data: bytes, *, active: bool = True) -> bytes:
        """The input without replies. If not `active`, all of it and what was held back."""
        data, self._held = self._held + data, b""
        if not active:
            return data
        data = _REPLY.sub(b"", data)
        begun = _BEGUN.search(data)
        if begun is None or len(begun[0]) > _MAX_REPLY:
            return data
        self._held = begun[0]
        return data[: begun.start()]


class Screen:
    """Tracks whether the program uses the alternate screen, to leave it after a detach."""

    def __init__(self) -> None:
        self.alternate = False
        self.since: float | None = None
        """Time of the first output."""
        self.pending = asyncio.Event()
        """Set when the program has to wait for the session."""
        self._tail = b""

    def feed(self, data: bytes) -> None:
        if self.since is None:
            self.since = time.monotonic()
        seen = self._tail + data
        on, off = seen.rfind(_ALTERNATE + b"h"), seen.rfind(_ALTERNATE + b"l")
        if max(on, off) >= 0:
            self.alternate = on > off
        self._tail = seen[-len(_ALTERNATE) :]

    def restoration(self) -> bytes:
        return _RESET + (_ALTERNATE + b"l" if self.alternate else b"")


def on_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def size() -> tuple[int, int]:
    """Rows and columns."""
    found = os.get_terminal_size(sys.stdout.fileno())
    return max(1, found.lines), max(1, found.columns)


@contextmanager
def raw(descriptor: int) -> Iterator[None]:
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


async def talk(
    console: "AsyncConsole", *, terminal: bool, watch: bool = False, attached: bool = False
) -> "ConsoleExit":
    """
    Connect the terminal to the console until the program ends. Raises `Detached` after Ctrl-P
    Ctrl-Q, or with `watch` after Ctrl-C. With `attached`, replies of the terminal to replayed
    output are filtered.
    """
    source = sys.stdin.fileno() if sys.stdin is not None else -1
    if not terminal:
        keys = _no_keys() if watch else _piped(source)
        return await _both_ways(console, keys, Screen(), eof=not watch)
    screen, loop = Screen(), asyncio.get_running_loop()
    resized = asyncio.Event()
    resized.set()
    loop.add_signal_handler(signal.SIGWINCH, resized.set)
    following = asyncio.create_task(_follow_size(console, resized))
    try:
        with raw(source):
            try:
                typed = _typed(source)
                if attached:
                    typed = _without_replies(typed, screen)
                keys = _until_interrupt(typed) if watch else typed
                return await _both_ways(console, keys, screen, eof=False)
            except BaseException:
                await _write(sys.stdout.fileno(), screen.restoration())
                raise
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _follow_size(console: "AsyncConsole", resized: asyncio.Event) -> None:
    while True:
        await resized.wait()
        resized.clear()
        await console.resize(*size())


async def _both_ways(
    console: "AsyncConsole", keys: AsyncIterator[bytes], screen: Screen, *, eof: bool
) -> "ConsoleExit":
    work = [
        asyncio.create_task(_show(console, screen)),
        asyncio.create_task(_send(console, keys, eof=eof)),
    ]
    waiting = asyncio.create_task(_note_waiting(console, screen))
    try:
        done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        if work[0] not in done:
            work[1].result()  # Raises `Detached`.
        return await work[0] or await console.wait()
    finally:
        for task in (*work, waiting):
            task.cancel()
        await asyncio.gather(*work, waiting, return_exceptions=True)


async def _note_waiting(console: "AsyncConsole", screen: Screen) -> None:
    """Explain an empty screen."""
    await screen.pending.wait()
    await asyncio.sleep(_NOTE_DELAY)
    if console.status == "pending" and screen.since is None and sys.stderr.isatty():
        await _write(sys.stderr.fileno(), b"atoll: waiting for the session\r\n")


async def _show(console: "AsyncConsole", screen: Screen) -> "ConsoleExit | None":
    targets = {"stdout": sys.stdout.fileno(), "stderr": sys.stderr.fileno()}
    reported: set[str | None] = set()
    async for event in console:
        if event.kind in targets:
            screen.feed(event.data)
            await _write(targets[event.kind], event.data)
        elif event.kind == "error" and event.code not in reported | _IGNORED_ERRORS:
            # Once, not for every key.
            reported.add(event.code)
            # In raw mode a line feed does not return to the first column.
            words = output.visible(f"atoll: {event.message} ({event.code})")
            await _write(targets["stderr"], f"\r\n{words}\r\n".encode())
        elif event.kind == "status":
            if event.status == "pending":
                screen.pending.set()
            if event.typing:
                reported.clear()
        elif event.exit is not None:
            return event.exit
    return None


async def _send(console: "AsyncConsole", keys: AsyncIterator[bytes], *, eof: bool) -> None:
    async for data in keys:
        await console.send(data)
    if eof:
        await console.send(b"", eof=True)


async def _typed(descriptor: int) -> AsyncIterator[bytes]:
    """Typed keys, until the terminal closes."""
    detach, loop = DetachKeys(), asyncio.get_running_loop()
    readable = asyncio.Event()
    while True:
        readable.clear()
        loop.add_reader(descriptor, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(descriptor)
        data = os.read(descriptor, PIECE)
        if not data:
            return
        if keys := detach.filter(data):
            yield keys


async def _without_replies(keys: AsyncIterator[bytes], screen: Screen) -> AsyncIterator[bytes]:
    replies = ReplyFilter()
    async for data in keys:
        active = screen.since is None or time.monotonic() - screen.since < FILTER_SECONDS
        if passed := replies.filter(data, active=active):
            yield passed


async def _until_interrupt(keys: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for data in keys:
        if INTERRUPT in data:
            raise Detached
    yield b""


async def _no_keys() -> AsyncIterator[bytes]:
    return
    yield


async def _piped(descriptor: int) -> AsyncIterator[bytes]:
    """Piped input. A daemon thread reads it, because the read may block forever."""
    if descriptor < 0:
        return
    loop = asyncio.get_running_loop()
    taken: asyncio.Queue[bytes] = asyncio.Queue(1)

    def read() -> None:
        data = b"-"
        while data:
            try:
                data = os.read(descriptor, PIECE)
                asyncio.run_coroutine_threadsafe(taken.put(data), loop).result()
            except (OSError, RuntimeError):
                return  # The loop is closed.

    threading.Thread(target=read, daemon=True).start()
    while data := await taken.get():
        yield data


async def _write(descriptor: int, data: bytes) -> None:
    """Write in a thread, because the reader may be slow."""

    def write() -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    await asyncio.to_thread(write)


def run(main: Callable[[], Awaitable[int]]) -> int:
    """Run on an event loop that cancels the work at SIGTERM and SIGHUP."""

    async def guarded() -> int:
        task: Any = asyncio.current_task()
        ended: list[int] = []

        def end(number: int) -> None:
            ended.append(number)
            task.cancel()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, end, number)
        try:
            return await main()
        except asyncio.CancelledError:
            if not ended:
                raise
            return exit_codes.by_signal(ended[0])

    return asyncio.run(guarded())
