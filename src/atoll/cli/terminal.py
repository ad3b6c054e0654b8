"""
The local end of a console: the terminal in raw mode, or whatever stdin and stdout are instead.

Keys go through as they are, Ctrl-C too; only Ctrl-P Ctrl-Q is for us, and leaves the program
running. However it ends, the terminal is given back as it was found.
"""

import asyncio
import os
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from atoll.cli import output, terminal_replies

if TYPE_CHECKING:
    from atoll.sdk.consoles import AsyncConsole
    from atoll.sdk.values import ConsoleExit

PIECE = 32 * 1024
CTRL_P, CTRL_Q = b"\x10", b"\x11"
INTERRUPT = b"\x03"
_WAIT_SECONDS = 0.5
"""Of waiting for the session in silence."""
_ALTERNATE = b"\x1b[?1049"
_RESET = b"\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1l\x1b>\x1b[?25h\x1b[0m"
"""Mouse, pasting and keys as usual, a cursor that is seen, no colours."""

_UNHEARD = frozenset({"execution_not_running", "stdin_closed"})
"""Why input was not taken, when its time was over: what other programs hear as a broken pipe."""


class Detached(Exception):
    """Ctrl-P Ctrl-Q was typed."""


class DetachKeys:
    """Passes on what is typed, and holds a Ctrl-P back until it is known what follows it."""

    def __init__(self) -> None:
        self._held = False

    def pass_on(self, data: bytes) -> bytes:
        """Raises `Detached` at the keys for it; what came before them is dropped."""
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


class Screen:
    """Knows whether a program shows its other screen, which it may not come to leave."""

    def __init__(self) -> None:
        self.alternate = False
        self.since: float | None = None
        """When it was first drawn on."""
        self.pending = asyncio.Event()
        """Set when it is known that the program has to wait."""
        self._tail = b""

    def see(self, data: bytes) -> None:
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
    Until the program ends; raises `Detached` when it was left, which a Ctrl-C of one who only
    watches does as well. When it was `attached` to, the terminal's answers to what is shown again
    are kept from it.
    """
    source = sys.stdin.fileno() if sys.stdin is not None else -1
    if not terminal:
        keys = _nothing() if watch else _piped(source)
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
                keys = _watching(typed) if watch else typed
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
    waiting = asyncio.create_task(_tell_of_waiting(console, screen))
    try:
        done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        if work[0] not in done:
            work[1].result()  # raises when it was left
        return await work[0] or await console.wait()
    finally:
        for task in (*work, waiting):
            task.cancel()
        await asyncio.gather(*work, waiting, return_exceptions=True)


async def _tell_of_waiting(console: "AsyncConsole", screen: Screen) -> None:
    """An empty screen says nothing to who sits before it."""
    await screen.pending.wait()
    await asyncio.sleep(_WAIT_SECONDS)
    if console.status == "pending" and screen.since is None and sys.stderr.isatty():
        await _write(sys.stderr.fileno(), b"atoll: waits for the session to be free\r\n")


async def _show(console: "AsyncConsole", screen: Screen) -> "ConsoleExit | None":
    targets = {"stdout": sys.stdout.fileno(), "stderr": sys.stderr.fileno()}
    told: set[str | None] = set()
    async for event in console:
        if event.kind in targets:
            screen.see(event.data)
            await _write(targets[event.kind], event.data)
        elif event.kind == "error" and event.code not in told | _UNHEARD:
            # Once: with every key it would be told again.
            told.add(event.code)
            # The terminal does nothing by itself now, not even to go back to the first column.
            words = output.visible(f"atoll: {event.message} ({event.code})")
            await _write(targets["stderr"], f"\r\n{words}\r\n".encode())
        elif event.kind == "status":
            if event.status == "pending":
                screen.pending.set()
            if event.typing:
                told.clear()
        elif event.exit is not None:
            return event.exit
    return None


async def _send(console: "AsyncConsole", keys: AsyncIterator[bytes], *, eof: bool) -> None:
    async for data in keys:
        await console.send(data)
    if eof:
        await console.send(b"", eof=True)


async def _typed(descriptor: int) -> AsyncIterator[bytes]:
    """What is typed, as long as there is a terminal."""
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
        if keys := detach.pass_on(data):
            yield keys


async def _without_replies(keys: AsyncIterator[bytes], screen: Screen) -> AsyncIterator[bytes]:
    filtered = terminal_replies.Replies()
    async for data in keys:
        old = screen.since is None or time.monotonic() - screen.since < terminal_replies.SECONDS
        if passed := filtered.pass_on(data, take_out=old):
            yield passed


async def _watching(keys: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for data in keys:
        if INTERRUPT in data:
            raise Detached
    yield b""


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield


async def _piped(descriptor: int) -> AsyncIterator[bytes]:
    """
    What is piped in. Read by a thread that nobody waits for: what comes at last may never come.
    """
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
                return  # The loop has ended.

    threading.Thread(target=read, daemon=True).start()
    while data := await taken.get():
        yield data


async def _write(descriptor: int, data: bytes) -> None:
    """Beside the loop: who reads it may take their time."""

    def write() -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    await asyncio.to_thread(write)


def run(main: Callable[[], Awaitable[int]]) -> int:
    """On a loop whose work ends in good order at SIGTERM and SIGHUP too."""

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
            return 128 + ended[0]

    return asyncio.run(guarded())
