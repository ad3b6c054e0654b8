"""
One connection to an executor, with many requests under way at once.

A request is a stream: `call` for those that answer once, `fetch` and `push` for bytes, `run` and
`attach` for executions, `watch` for who follows one at a pace of their own. When the connection
ends, every open request raises `LinkLost`; what was running inside goes on, and a new connection
attaches to it.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from atoll.errors import InvalidRequest, TemporaryError
from atoll.executor import frames
from atoll.executor.connection import MAX_STREAMS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from datetime import timedelta

    from atoll.settings import LinkSettings


ACK_SECONDS = 0.02
DEPTH = 512
"""Most levels of a return value: what is deeper some reader, or ourselves, could not read again."""
KEPT_FREE = 256
"""Of the streams that an executor takes, so many are for what runs."""
_VITAL = frozenset({"run", "attach", "cancel", "answer", "release", "shutdown"})
LOOKS = 5
"""How often the link is looked at in the time after which silence means that it is lost."""


class LinkLost(TemporaryError):
    """The connection is gone; the request may or may not have been done."""

    code = "link_lost"


class LinkCrowded(TemporaryError):
    """More is under way at once than an executor takes, and nothing was sent."""

    code = "session_crowded"


class ExecutorError(InvalidRequest):
    """The executor refused a request; `code` is its own."""


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
    __slots__ = ("credit", "done", "drained", "incoming", "listener", "number", "owed")

    def __init__(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.done: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.incoming: asyncio.Queue[bytes | Piece | dict[str, Any] | None] | None = None
        self.listener: RunListener | None = None
        self.credit = frames.WINDOW
        self.owed = 0
        """Bytes received that the executor has not been credited for."""
        self.drained: asyncio.Event | None = None


class Link(asyncio.Protocol):
    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._decoder = frames.Decoder()
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, _Stream] = {}
        self._last = 0
        self._greeting: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._writable = asyncio.Event()
        self._writable.set()
        self._later = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._followed = 0
        self._heard = False
        """Whether anything came since it was last looked at."""
        self._look: asyncio.TimerHandle | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.hello: dict[str, Any] = {}
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

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._writable.set()
        if self._look is not None:
            self._look.cancel()
        lost = LinkLost("The connection to the executor was lost.")
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
        try:
            for frame in self._decoder.feed(data):
                self._dispatch(frame)
        except frames.ProtocolError:
            # What is at the other end is not an executor that can be trusted with anything more.
            assert self._transport is not None
            self._transport.abort()

    def _dispatch(self, frame: frames.Frame) -> None:
        number, kind, payload = frame
        if number == 0:
            self._about_itself(kind, payload)
            return
        stream = self._streams.get(number)
        if stream is None:
            return
        if kind == frames.OUTPUT:
            sequence, channel, data = frames.decode_output(payload)
            if stream.incoming is not None:
                # Credited when it is taken.
                stream.incoming.put_nowait(Piece(sequence, channel, data))
                return
            if stream.listener is not None:
                stream.listener.output(sequence, channel, data)
            stream.owed += len(payload)
            if stream.owed >= frames.WINDOW // 2:
                self._grant(number, stream.owed)
                stream.owed = 0
        elif kind == frames.END:
            self._finish(stream, frames.decode_json(payload))
        elif kind == frames.EVENT:
            event = frames.decode_json(payload)
            if stream.incoming is not None:
                stream.incoming.put_nowait(event)
            elif stream.listener is not None and event.get("event") == "heartbeat":
                stream.listener.heartbeat()
            elif stream.listener is not None:
                stream.listener.started()
        elif kind == frames.DATA and stream.incoming is not None:
            stream.incoming.put_nowait(payload)
        elif kind == frames.CREDIT:
            stream.credit += frames.decode_credit(payload)
            if stream.drained is not None:
                stream.drained.set()
        elif kind == frames.ERROR:
            problem = frames.decode_json(payload)
            self._fail(
                stream,
                ExecutorError(str(problem.get("message")), code=str(problem.get("code"))),
            )

    def _about_itself(self, kind: int, payload: bytes) -> None:
        content = frames.decode_json(payload)
        if kind == frames.HELLO and not self._greeting.done():
            self._greeting.set_result(content)
        elif kind == frames.ERROR and not self._greeting.done():
            code, message = str(content.get("code")), str(content.get("message"))
            self._greeting.set_exception(ExecutorError(message, code=code))
        elif kind == frames.EVENT and content.get("event") == "zygote" and self.on_zygote:
            self.on_zygote(int(content["pid"]))

    # Streams

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            raise LinkLost("The connection to the executor was lost.")
        if self._later:
            data = bytes(self._later) + data
            self._later.clear()
        self._transport.write(data)

    def _grant(self, number: int, count: int) -> None:
        if self._transport is not None and not self._transport.is_closing():
            body = frames.CREDIT_BODY.pack(count)
            self._transport.write(frames.encode(number, frames.CREDIT, body))

    def _open(self, op: str, request: dict[str, Any], *, vital: bool = True) -> _Stream:
        """One too many would end the connection, and with it all that is under way."""
        if len(self._streams) >= MAX_STREAMS - KEPT_FREE and not (vital and op in _VITAL):
            raise LinkCrowded("Too much is under way with this session at once.")
        self._last = self._last % 0xFFFF_FFFE + 1
        stream = _Stream(self._last, self._loop)
        self._write(frames.encode_json(stream.number, frames.OPEN, {"op": op, **request}))
        self._streams[stream.number] = stream
        return stream

    def _finish(self, stream: _Stream, value: dict[str, Any]) -> None:
        self._streams.pop(stream.number, None)
        if not stream.done.done():
            stream.done.set_result(value)
        if stream.incoming is not None:
            stream.incoming.put_nowait(None)
        if stream.drained is not None:
            stream.drained.set()

    def _fail(self, stream: _Stream, error: Exception) -> None:
        self._streams.pop(stream.number, None)
        if not stream.done.done():
            stream.done.set_exception(error)
            stream.done.exception()  # Retrieved: a reader that left early is not a warning.
        if stream.incoming is not None:
            stream.incoming.put_nowait(None)
        if stream.drained is not None:
            stream.drained.set()

    def _reset(self, stream: _Stream) -> None:
        if self._streams.pop(stream.number, None) is not None and self.alive:
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
        """
        The result is stored: the executor may forget it. Nothing answers; it travels with the next
        request, or a moment later by itself.
        """
        if self.alive:
            self._last = self._last % 0xFFFF_FFFE + 1
            self._later += frames.encode_json(self._last, frames.OPEN, {"op": "ack", "id": run_id})
            if len(self._later) > frames.CHUNK:
                self._write(b"")
            elif self._timer is None:
                self._timer = self._loop.call_later(ACK_SECONDS, self._flush)

    def _flush(self) -> None:
        self._timer = None
        if self._later and self.alive:
            self._write(b"")

    async def run(self, request: dict[str, Any], listener: RunListener) -> dict[str, Any]:
        """Run something, or attach to it if the executor has it already; its result."""
        return await self._follow(self._open("run", request), listener)

    async def attach(
        self, run_id: str, after: int, listener: RunListener, *, expected: bool = False
    ) -> dict[str, Any]:
        """
        Hear a run's output from behind sequence number `after` on; its result. With `expected`, a
        run that has not come yet is waited for.
        """
        request = {"id": run_id, "after": after, "expected": expected}
        # One that has not come yet is not heard of either.
        return await self._follow(self._open("attach", request), listener, heard=not expected)

    async def _follow(
        self, stream: _Stream, listener: RunListener, *, heard: bool = True
    ) -> dict[str, Any]:
        stream.listener = listener
        if heard:
            self._look_after()
        try:
            return await stream.done
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
        stream.incoming = asyncio.Queue()
        taken, begun = 0, False
        try:
            while (item := await stream.incoming.get()) is not None:
                if isinstance(item, Piece):
                    yield item
                    taken += len(item.data) + frames.OUTPUT_HEADER.size
                    if stream.incoming.empty() or taken >= frames.WINDOW // 4:
                        self._grant(stream.number, taken)
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
    ) -> tuple[dict[str, Any], AsyncIterator[bytes]]:
        """
        A file: what it is, and its content piece by piece as fast as the caller takes it.

        With `part`, its bytes from first to last, or the last so many when there is no first; all
        of them if it has another tag than `if_range`. `start` and `stop` in the answer say which;
        `start` is None when it has none of them. With `head`, none at all.
        """
        request = {"path": path, "range": part, "if_range": if_range, "head": head}
        first, content = await self.fetch("read", **request)
        return first["entry"], content

    async def fetch(self, op: str, **request: Any) -> tuple[dict[str, Any], AsyncIterator[bytes]]:
        """A request that answers with an event and then with bytes, as the caller takes them."""
        stream = self._open(op, request)
        stream.incoming = asyncio.Queue()
        try:
            async with asyncio.timeout(self._settings.read_timeout.total_seconds()):
                first = await stream.incoming.get()
            if not isinstance(first, dict):
                await stream.done
                raise LinkLost(f"The executor ended {op} without a word.")
        except TimeoutError:
            self._reset(stream)
            raise LinkLost(f"The executor did not answer {op} in time.") from None
        except BaseException:
            self._reset(stream)
            raise
        return first, self._content(stream)

    async def _content(self, stream: _Stream) -> AsyncIterator[bytes]:
        assert stream.incoming is not None
        try:
            while (piece := await stream.incoming.get()) is not None:
                if isinstance(piece, bytes):
                    yield piece
                    self._grant(stream.number, len(piece))
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
    ) -> dict[str, Any]:
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
        entry: dict[str, Any] = answer["entry"]
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
                    self._write(frames.encode(stream.number, frames.DATA, bytes(piece)))
                    view = view[len(piece) :]
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
        stream.incoming = asyncio.Queue()
        patience = self._settings.read_timeout.total_seconds()
        taken = 0
        try:
            while True:
                # Credited together: each credit is a message, and files may be small.
                if taken >= frames.WINDOW // 2 or (taken and stream.incoming.empty()):
                    self._grant(stream.number, taken)
                    taken = 0
                if stream.incoming.empty():
                    async with asyncio.timeout(patience):
                        item = await stream.incoming.get()
                else:
                    item = stream.incoming.get_nowait()
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


def parse_value(data: bytes, limit: int) -> tuple[bytes | None, dict[str, Any] | None]:
    """
    What a process said of its own result: the JSON of its return value, or an error.

    The process may have written anything; what is not what our own code writes becomes an error.
    """
    if not data:
        return None, None
    kind, body = data[:1], data[1:]
    try:
        if len(body) > limit and kind == b"V":
            return None, {
                "code": "return_value_too_large",
                "message": f"the return value has more than {limit} bytes of JSON",
            }
        value = strict_json(body)
        if kind == b"V":
            if body.count(b"[") + body.count(b"{") > DEPTH and not is_within(value, DEPTH):
                return None, {
                    "code": "return_value_not_json",
                    "message": f"the return value is nested deeper than {DEPTH} levels",
                }
            return body, None
        if kind == b"E" and isinstance(value, dict):
            fields = ("code", "message", "name", "traceback")
            return None, {name: str(value[name]) for name in fields if name in value}
    except (ValueError, RecursionError):
        pass
    return None, {
        "code": "return_value_not_json",
        "message": "the process wrote something to its result that is not JSON",
    }


def is_within(value: Any, depth: int) -> bool:
    """Whether JSON is nested no deeper than so many levels."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return True
    return False


def strict_json(text: bytes) -> Any:
    """What JSON allows and nothing else; raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def _finite(text: str) -> float:
    """JSON has no infinity; a number that is too large for us must not become one."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(text)
    return number
