"""
One connection to an executor, with many requests under way at once.

Nothing that an executor sends is believed: frames are bounded by kind, data is counted against the
credit that was granted, and every message is checked (`messages`) before anybody sees it. A
violation ends the connection, and every open request raises it; `violation` keeps it for the owner
of the instance.

A request is a stream: `call` for those that answer once, `fetch` and `push` for bytes, `run` and
`attach` for executions, `watch` for who follows one at a pace of their own. When the connection
ends, every open request raises `LinkLost`; what was running inside goes on, and a new connection
attaches to it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from atoll.link import messages, validation
from atoll.link.credit import Inbox, Rate, Strays, Window
from atoll.link.errors import ExecutorError, LinkCrowded, LinkLost, ProtocolViolation
from atoll.link.output import Intake, RunLimits
from atoll.protocol import frames
from atoll.protocol.limits import MAX_STREAMS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from datetime import timedelta

    from atoll.link.messages import FileEntry, Hello, RunResult
    from atoll.settings import LinkSettings

__all__ = [
    "ExecutorError",
    "Link",
    "LinkCrowded",
    "LinkLost",
    "Piece",
    "ProtocolViolation",
    "RunListener",
]

NOTIFY_SECONDS = 0.02
"""How long a request that nothing answers may wait for one that it can travel with."""
KEPT_FREE = 256
"""Of the streams that an executor takes, so many are for what runs."""
_VITAL = frozenset({"run", "attach", "cancel", "answer", "release", "shutdown"})
_RUNS = ("run", "attach")
MAX_UNSENT = 32 * 1024 * 1024
"""Bytes that wait for an executor to read them, beyond which it is given no other request."""
CLOSE_SECONDS = 2.0
"""For an executor to read what it was sent before a connection was closed."""
LOOKS = 5
"""How often the link is looked at in the time after which silence means that it is lost."""


class RunListener(Protocol):
    """Hears of a run as it goes. Called from the loop; must not block."""

    def started(self) -> None: ...
    def output(self, sequence: int, channel: int, data: bytes) -> None: ...
    def heartbeat(self) -> None: ...


class Piece(NamedTuple):
    """A piece of what a run wrote."""

    sequence: int
    channel: int
    data: bytes


class _Stream:
    __slots__ = (
        "carries",
        "credit",
        "done",
        "drained",
        "events",
        "granted",
        "inbox",
        "intake",
        "listener",
        "number",
        "op",
        "owed",
        "sent",
        "window",
    )

    def __init__(self, number: int, op: str, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.op = op
        self.done: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.carries = 0
        """The kind of frame by which the executor may send bytes, if any."""
        self.inbox: Inbox[bytes | Piece | dict[str, Any]] | None = None
        self.listener: RunListener | None = None
        self.intake: Intake | None = None
        self.window = Window()
        self.events = Rate()
        self.owed = 0
        """Bytes received that the executor has not been credited for."""
        self.drained: asyncio.Event | None = None
        """Set when there is credit; only where this side sends bytes."""
        self.credit = frames.WINDOW
        self.sent = self.granted = 0
        """Bytes that this side has sent, and that the executor has credited."""


class Link(asyncio.Protocol):
    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._decoder = frames.Decoder(validation.PAYLOADS)
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, _Stream] = {}
        self._strays = Strays()
        self._events = Rate()
        self._last = 0
        self._greeting: asyncio.Future[Hello] = self._loop.create_future()
        self._writable = asyncio.Event()
        self._writable.set()
        self._later = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._followed = 0
        self._heard = False
        """Whether anything came since it was last looked at."""
        self._look: asyncio.TimerHandle | None = None
        self._abort: asyncio.TimerHandle | None = None
        """Ends a connection that was closed, and whose other end does not read."""
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.violation: ProtocolViolation | None = None
        """Why this side ended the connection, if it was for that."""
        self.hello: Hello
        self.on_zygote: Callable[[int], None] | None = None
        """Told of a new zygote's pid (in its namespace), which waits to be released."""

    # Life

    @classmethod
    async def connect(
        cls, path: str, settings: LinkSettings, *, timeout: timedelta, token: str | None = None
    ) -> Link:
        """Connect to a unix socket and exchange hellos; `token` is by what right."""
        loop = asyncio.get_running_loop()

        async def dial(link: Link) -> None:
            await loop.create_unix_connection(lambda: link, path)

        return await cls.over(dial, path, settings, timeout=timeout, token=token)

    @classmethod
    async def over(
        cls,
        dial: Callable[[Link], Awaitable[None]],
        place: str,
        settings: LinkSettings,
        *,
        timeout: timedelta,
        token: str | None = None,
    ) -> Link:
        """
        The same over any transport: `dial` makes a connection with the link as its protocol, to
        what is called `place` in errors.
        """
        link = cls(settings)
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                try:
                    await dial(link)
                    await link._greet(token)
                except BaseException:
                    link.close()
                    raise
        except TimeoutError:
            raise LinkLost(f"The executor at {place} did not answer in {timeout}.") from None
        except OSError as error:
            raise LinkLost(f"The executor at {place} cannot be reached: {error}.") from error
        return link

    async def _greet(self, token: str | None) -> None:
        hello: dict[str, Any] = {"versions": [frames.VERSION]}
        if token is not None:
            hello["token"] = token
        self._write(frames.encode_json(0, frames.HELLO, hello))
        self.hello = await self._greeting

    @property
    def alive(self) -> bool:
        closing = self._transport is not None and self._transport.is_closing()
        return not closing and not self.closed.done()

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()
            if self._abort is None and not self.closed.done():
                self._abort = self._loop.call_later(CLOSE_SECONDS, self._transport.abort)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._writable.set()
        for timer in (self._look, self._abort):
            if timer is not None:
                timer.cancel()
        lost = self.violation or LinkLost("The connection to the executor was lost.")
        if not self._greeting.done():
            self._greeting.set_exception(lost)
            self._greeting.exception()  # Retrieved: after a cancelled connect nobody waits for it.
        for stream in list(self._streams.values()):
            self._fail(stream, lost)
        self._streams.clear()
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self.violation is not None:
            return
        try:
            for frame in self._decoder.feed(data):
                self._dispatch(frame)
        except ProtocolViolation as violation:
            self.violated(violation)
        except frames.ProtocolError as error:
            self.violated(ProtocolViolation(f"The executor sent an invalid frame: {error}."))

    def violated(self, violation: ProtocolViolation) -> None:
        """End the connection: what is at the other end cannot be trusted with anything more."""
        if self.violation is None:
            self.violation = violation
        if self._transport is not None:
            self._transport.abort()

    def _dispatch(self, frame: frames.Frame) -> None:
        number, kind, payload = frame
        if number == 0:
            self._about_itself(kind, payload)
            return
        stream = self._streams.get(number)
        if stream is None:
            if number > self._last:
                raise ProtocolViolation(f"The executor sent a frame for stream {number}.")
            self._strays.take(len(payload))
        elif kind in (frames.OUTPUT, frames.DATA):
            if kind != stream.carries:
                raise ProtocolViolation(f"The executor sent bytes for {stream.op}.")
            stream.window.take(len(payload))
            if kind == frames.OUTPUT:
                self._output(stream, payload)
            elif stream.inbox is None or not payload:
                raise ProtocolViolation(f"The executor sent no bytes for {stream.op}.")
            else:
                stream.inbox.put(payload, len(payload))
        elif kind == frames.END:
            self._finish(stream, self._answer(stream, validation.decoded(payload)))
        elif kind == frames.EVENT:
            self._event(stream, payload)
        elif kind == frames.CREDIT:
            self._credited(stream, frames.decode_credit(payload))
        elif kind == frames.ERROR:
            self._fail(stream, messages.refused(stream.op, validation.decoded(payload)))
        else:
            raise ProtocolViolation(f"The executor sent a frame of kind {kind} for a request.")

    def _output(self, stream: _Stream, payload: bytes) -> None:
        sequence, channel, data = frames.decode_output(payload)
        if stream.inbox is not None:
            # Credited when it is taken.
            stream.inbox.put(Piece(sequence, channel, data), len(payload))
            return
        if stream.intake is not None:
            data = stream.intake.take(sequence, channel, data)
        if stream.listener is not None and data:
            stream.listener.output(sequence, channel, data)
        stream.owed += len(payload)
        if stream.owed >= frames.WINDOW // 2:
            self._grant(stream, stream.owed)
            stream.owed = 0

    @staticmethod
    def _answer(stream: _Stream, content: dict[str, Any]) -> dict[str, Any]:
        if stream.op in _RUNS:
            return cast("dict[str, Any]", messages.result(content, stream.intake))
        return messages.answer(stream.op, content)

    def _event(self, stream: _Stream, payload: bytes) -> None:
        if stream.op not in _RUNS:
            if stream.inbox is None:
                raise ProtocolViolation(f"The executor sent an event for {stream.op}.")
            # Bounded by what may wait: files have as many as there are files.
            event = messages.event(stream.op, validation.decoded(payload))
            stream.inbox.put(event, len(payload))
            return
        stream.events.count()
        if len(payload) > messages.SHORT_EVENT:
            raise ProtocolViolation("The executor sent an event of a run that is too long.")
        name = validation.decoded(payload).get("event")
        if name == "started" and stream.inbox is not None:
            stream.inbox.put({"event": name}, len(payload))
        elif name == "started" and stream.listener is not None:
            stream.listener.started()
        elif name == "heartbeat" and stream.listener is not None:
            stream.listener.heartbeat()

    def _credited(self, stream: _Stream, count: int) -> None:
        if count == 0:
            stream.events.count()
        stream.granted += count
        if stream.drained is None or stream.granted > stream.sent:
            raise ProtocolViolation("The executor credits bytes that it was not sent.")
        stream.credit += count
        stream.drained.set()

    def _about_itself(self, kind: int, payload: bytes) -> None:
        greeted = self._greeting.done()
        if kind == frames.HELLO and not greeted:
            self._greeting.set_result(messages.hello(validation.decoded(payload)))
        elif kind == frames.ERROR and not greeted:
            self._greeting.set_exception(messages.refused("hello", validation.decoded(payload)))
        elif kind == frames.EVENT and len(payload) <= messages.SHORT_EVENT:
            self._events.count()
            zygote = messages.zygote(validation.decoded(payload))
            # One that comes before the hello is named in it, or there is a newer one.
            if greeted and zygote is not None and self.on_zygote is not None:
                self.on_zygote(zygote)
        else:
            raise ProtocolViolation(f"The executor sent a frame of kind {kind} for no request.")

    # Streams

    @property
    def _unsent(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            raise self.violation or LinkLost("The connection to the executor was lost.")
        if self._later:
            data = bytes(self._later) + data
            self._later.clear()
        self._transport.write(data)

    def _grant(self, stream: _Stream, count: int) -> None:
        stream.window.grant(count)
        if self._transport is not None and not self._transport.is_closing():
            body = frames.CREDIT_BODY.pack(count)
            self._transport.write(frames.encode(stream.number, frames.CREDIT, body))

    def _open(self, op: str, request: dict[str, Any], *, vital: bool = True) -> _Stream:
        """One too many would end the connection, and with it all that is under way."""
        if not (vital and op in _VITAL):
            if len(self._streams) >= MAX_STREAMS - KEPT_FREE:
                raise LinkCrowded("Too much is under way with this session at once.")
            if self._unsent > MAX_UNSENT:
                raise LinkCrowded("The session does not read the requests that it was sent.")
        self._last = self._last % 0xFFFF_FFFE + 1
        stream = _Stream(self._last, op, self._loop)
        self._write(frames.encode_json(stream.number, frames.OPEN, {"op": op, **request}))
        self._streams[stream.number] = stream
        return stream

    def _finish(self, stream: _Stream, value: dict[str, Any]) -> None:
        self._streams.pop(stream.number, None)
        if not stream.done.done():
            stream.done.set_result(value)
        if stream.inbox is not None:
            stream.inbox.end()
        if stream.drained is not None:
            stream.drained.set()

    def _fail(self, stream: _Stream, error: Exception) -> None:
        self._streams.pop(stream.number, None)
        if not stream.done.done():
            stream.done.set_exception(error)
            stream.done.exception()  # Retrieved: a reader that left early is not a warning.
        if stream.inbox is not None:
            stream.inbox.end()
        if stream.drained is not None:
            stream.drained.set()

    def _reset(self, stream: _Stream) -> None:
        if self._streams.pop(stream.number, None) is not None and self.alive:
            self._strays.reset()
            self._write(frames.encode(stream.number, frames.RESET))

    # Requests

    async def call(
        self, op: str, *, within: timedelta | None = None, **request: Any
    ) -> dict[str, Any]:
        """A request that answers once; `within` is for those that may take longer than others."""
        stream = self._open(op, request)
        try:
            async with asyncio.timeout((within or self._settings.read_timeout).total_seconds()):
                return await stream.done
        except TimeoutError:
            raise LinkLost(f"The executor did not answer {op} in time.") from None
        finally:
            self._reset(stream)

    def acknowledge(self, run_id: str) -> None:
        """The result is stored: the executor may forget it."""
        self._notify("ack", {"id": run_id})

    def announce_end(self, ends_in: float) -> None:
        """
        The session ends in so many seconds: the executor ends the instance some time after that,
        unless a control plane is connected to it then.
        """
        grace, limit = self._settings.unattended_grace, self._settings.unattended_limit
        life = {
            "ends_in": ends_in,
            "grace": grace.total_seconds(),
            "limit": limit.total_seconds(),
        }
        self._notify("unattended", life)

    def _notify(self, op: str, request: dict[str, Any]) -> None:
        """
        Send a request that nothing answers. It travels with the next one, or a moment later.
        """
        if self.alive:
            self._last = self._last % 0xFFFF_FFFE + 1
            self._later += frames.encode_json(self._last, frames.OPEN, {"op": op, **request})
            if len(self._later) > frames.CHUNK:
                self._write(b"")
            elif self._timer is None:
                self._timer = self._loop.call_later(NOTIFY_SECONDS, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if self._later and self.alive:
            self._write(b"")

    async def run(
        self, request: dict[str, Any], listener: RunListener, intake: Intake | None = None
    ) -> RunResult:
        """
        Run something, or attach to it if the executor has it already; its result. `intake` counts
        its output, when it may be followed by another link later.
        """
        intake = intake or Intake(RunLimits.of(request), requested=True)
        return await self._follow(self._open("run", request), listener, intake)

    async def attach(
        self,
        run_id: str,
        after: int,
        listener: RunListener | None,
        intake: Intake | None = None,
        *,
        expected: bool = False,
    ) -> RunResult:
        """
        Follow a run's output from behind sequence number `after` on; its result. With `expected`, a
        run that has not come yet is waited for. `intake` bounds what the listener is given, and a
        listener that keeps anything needs one. Without a listener only the result is of interest.
        """
        if intake is not None:
            # Beyond its limits an intake drops entries, which the listener does not know of.
            after = max(after, intake.sequence)
        request = {"id": run_id, "after": after, "expected": expected}
        # One that has not come yet is not heard of either.
        stream = self._open("attach", request)
        return await self._follow(stream, listener, intake, heard=not expected)

    async def _follow(
        self,
        stream: _Stream,
        listener: RunListener | None,
        intake: Intake | None,
        *,
        heard: bool = True,
    ) -> RunResult:
        stream.carries = frames.OUTPUT
        stream.listener, stream.intake = listener, intake
        if heard:
            self._look_after()
        try:
            return cast("RunResult", await stream.done)
        finally:
            self._followed -= heard
            self._reset(stream)

    async def watch(
        self, run_id: str, after: int, *, expected: bool = False
    ) -> AsyncIterator[Piece | dict[str, Any]]:
        """
        Follow a run from behind sequence number `after` on, as fast as the caller takes it: pieces,
        events, and at the end `{"event": "end", "result": …}`.

        No more than a window waits here. Who is slower than that misses what the executor does not
        keep for so long, and slows nobody else.
        """
        request = {"id": run_id, "after": after, "expected": expected}
        stream = self._open("attach", request, vital=False)
        stream.carries, inbox = frames.OUTPUT, Inbox[bytes | Piece | dict[str, Any]]()
        stream.inbox = inbox
        taken, begun = 0, False
        try:
            while (item := await inbox.get()) is not None:
                if isinstance(item, Piece):
                    yield item
                    taken += len(item.data) + frames.OUTPUT_HEADER.size
                    if inbox.empty() or taken >= frames.WINDOW // 4:
                        self._grant(stream, taken)
                        taken = 0
                elif isinstance(item, dict):
                    if not begun:
                        # From now on: one that has not begun is not heard of.
                        begun = True
                        self._look_after()
                    yield item
            yield {"event": "end", "result": await stream.done}
        finally:
            self._followed -= begun
            self._reset(stream)

    def _look_after(self) -> None:
        """See that the executor is heard of, as long as somebody follows a run."""
        self._followed += 1
        if self._look is None:
            self._look_later(silent=0)

    def _look_later(self, silent: int) -> None:
        pause = self._settings.lost_after.total_seconds() / LOOKS
        self._look = self._loop.call_later(pause, self._look_for_life, silent)

    def _look_for_life(self, silent: int) -> None:
        """
        An executor that runs something is heard of every few seconds. Counted in looks and not in
        time: this process may have stood still itself.
        """
        self._look = None
        silent = 0 if self._heard else silent + 1
        self._heard = False
        if not self._followed or self._transport is None:
            return
        if silent < LOOKS:
            self._look_later(silent)
        else:
            # Whoever follows finds out whether the instance lives.
            self._transport.abort()

    async def read(
        self,
        path: str,
        *,
        part: tuple[int | None, int | None] | None = None,
        if_range: str | None = None,
        head: bool = False,
    ) -> tuple[FileEntry, AsyncIterator[bytes]]:
        """
        A file: what it is, and its content piece by piece as fast as the caller takes it.

        With `part`, its bytes from first to last, or the last so many when there is no first; all
        of them if it has another tag than `if_range`. `start` and `stop` in the answer say which;
        `start` is None when it has none of them. With `head`, none at all.
        """
        request = {"path": path, "range": part, "if_range": if_range, "head": head}
        first, content = await self.fetch("read", **request)
        entry: FileEntry = first["entry"]
        start = entry["start"]
        size = 0 if head or start is None else entry["stop"] - start
        return entry, self._at_most(size, content)

    async def _at_most(self, size: int, content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """As many bytes as were announced: who passes them on has said how many there are."""
        async for piece in content:
            size -= len(piece)
            if size < 0:
                violation = ProtocolViolation("The executor sent more of a file than it announced.")
                self.violated(violation)
                raise violation
            yield piece

    async def fetch(self, op: str, **request: Any) -> tuple[dict[str, Any], AsyncIterator[bytes]]:
        """A request that answers with an event and then with bytes, as the caller takes them."""
        stream = self._open(op, request)
        stream.carries, inbox = frames.DATA, Inbox[bytes | Piece | dict[str, Any]]()
        stream.inbox = inbox
        try:
            async with asyncio.timeout(self._settings.read_timeout.total_seconds()):
                first = await inbox.get()
            if not isinstance(first, dict):
                await stream.done
                raise LinkLost(f"The executor ended {op} without a word.")
        except TimeoutError:
            self._reset(stream)
            raise LinkLost(f"The executor did not answer {op} in time.") from None
        except BaseException:
            self._reset(stream)
            raise
        return first, self._content(stream, inbox)

    async def _content(
        self, stream: _Stream, inbox: Inbox[bytes | Piece | dict[str, Any]]
    ) -> AsyncIterator[bytes]:
        taken = 0
        try:
            while (piece := await inbox.get()) is not None:
                if isinstance(piece, bytes):
                    yield piece
                    taken += len(piece)
                    if inbox.empty() or taken >= frames.WINDOW // 4:
                        self._grant(stream, taken)
                        taken = 0
            await stream.done
        finally:
            self._reset(stream)

    async def write(
        self,
        path: str,
        content: AsyncIterator[bytes],
        *,
        mode: int = 0o644,
        if_match: list[str] | None = None,
        if_none_match: list[str] | None = None,
        disk: int | None = None,
    ) -> FileEntry:
        """
        Write a file whole or not at all; what it became. `disk` is how large the workspace may be,
        where the executor has to see to that.
        """
        answer = await self.push(
            "write",
            content,
            path=path,
            mode=mode,
            if_match=if_match,
            if_none_match=if_none_match,
            disk=disk,
        )
        entry: FileEntry = answer["entry"]
        return entry

    async def push(
        self,
        op: str,
        content: AsyncIterator[bytes],
        *,
        within: timedelta | None = None,
        **request: Any,
    ) -> dict[str, Any]:
        """
        A request that takes bytes and then answers; `within` is its time to go on taking them, and
        to answer after the last.
        """
        patience = (within or self._settings.read_timeout).total_seconds()
        stream = self._open(op, request)
        stream.drained = asyncio.Event()
        try:
            async for block in content:
                view = memoryview(block)
                while view:
                    while stream.credit <= 0 and not stream.done.done():
                        stream.drained.clear()
                        async with asyncio.timeout(patience):
                            await stream.drained.wait()
                    if stream.done.done():
                        break
                    piece = view[: min(stream.credit, frames.CHUNK)]
                    stream.credit -= len(piece)
                    stream.sent += len(piece)
                    self._write(frames.encode(stream.number, frames.DATA, bytes(piece)))
                    view = view[len(piece) :]
                    async with asyncio.timeout(patience):
                        await self._writable.wait()
                if stream.done.done():
                    break
            if not stream.done.done():
                self._write(frames.encode(stream.number, frames.FINISH))
            async with asyncio.timeout(patience):
                return await stream.done
        except TimeoutError:
            raise LinkLost(f"The executor did not finish {op} in time.") from None
        finally:
            self._reset(stream)

    async def pull(self, op: str, **request: Any) -> AsyncIterator[bytes | dict[str, Any]]:
        """
        What a request sends, bytes and events in order, as fast as the caller takes it; its answer
        comes last.
        """
        stream = self._open(op, request)
        stream.carries, inbox = frames.DATA, Inbox[bytes | Piece | dict[str, Any]]()
        stream.inbox = inbox
        patience = self._settings.read_timeout.total_seconds()
        taken = 0
        try:
            while True:
                # Credited together: each credit is a message, and files may be small.
                if taken >= frames.WINDOW // 2 or (taken and inbox.empty()):
                    self._grant(stream, taken)
                    taken = 0
                if inbox.empty():
                    async with asyncio.timeout(patience):
                        item = await inbox.get()
                else:
                    item = await inbox.get()
                if item is None:
                    break
                if isinstance(item, bytes):
                    yield item
                    taken += len(item)
                elif isinstance(item, dict):
                    yield item
            yield await stream.done
        except TimeoutError:
            raise LinkLost(f"The executor did not go on with {op} in time.") from None
        finally:
            self._reset(stream)
