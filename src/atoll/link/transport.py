"""
The transport of a link: frames in and out, and the streams that they belong to.

Nothing that an executor sends is trusted: frames are bounded by kind, data is counted against the
credit that was granted, and every message is checked (`messages`) before any other code sees it. A
violation ends the connection, and every open request raises it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from atoll.link import messages, validation
from atoll.link.credit import LateFrames, Rate
from atoll.link.errors import LinkLost, LinkSaturated, ProtocolViolation
from atoll.link.liveness import Liveness
from atoll.link.stream import NO_READER, Piece, Stream
from atoll.protocol import frames
from atoll.protocol.limits import MAX_STREAMS

if TYPE_CHECKING:
    from collections.abc import Callable

    from atoll.link.messages import Hello
    from atoll.link.stream import Reader
    from atoll.settings import LinkSettings

NOTIFY_DELAY = 0.02
"""How long a request without an answer may wait for another one to travel with."""
RESERVED_STREAMS = 256
"""Streams that only requests about runs may use."""
_VITAL = frozenset({"run", "attach", "cancel", "answer", "release", "shutdown"})
_RUNS = ("run", "attach")
MAX_UNSENT = 32 * 1024 * 1024
"""Bytes that the executor has not read, beyond which only vital requests are sent."""
CLOSE_TIMEOUT = 2.0
"""For the executor to read what was sent before the connection was closed."""


class LinkTransport(asyncio.Protocol):
    def __init__(self, settings: LinkSettings) -> None:
        self._loop = asyncio.get_running_loop()
        self._decoder = frames.Decoder(validation.PAYLOADS)
        self._transport: asyncio.Transport | None = None
        self._streams: dict[int, Stream] = {}
        self._late_frames = LateFrames()
        self._events = Rate()
        self._last = 0
        """Number of the latest stream."""
        self._notifications = bytearray()
        """Requests without an answer that have not been sent yet."""
        self._notify_timer: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
        self._zygote_observers: list[Callable[[int], None]] = []
        self.greeting: asyncio.Future[Hello] = self._loop.create_future()
        self.writable = asyncio.Event()
        self.writable.set()
        self.liveness = Liveness(self._loop, settings.lost_after, self.abort)
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.violation: ProtocolViolation | None = None

    def observe_zygotes(self, observer: Callable[[int], None]) -> None:
        self._zygote_observers.append(observer)

    @property
    def alive(self) -> bool:
        closing = self._transport is not None and self._transport.is_closing()
        return not closing and not self.closed.done()

    def close(self) -> None:
        if self._transport is not None:
            self._send_notifications()
            self._transport.close()
            if self._abort_timer is None and not self.closed.done():
                self._abort_timer = self._loop.call_later(CLOSE_TIMEOUT, self._transport.abort)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def violated(self, violation: ProtocolViolation) -> None:
        if self.violation is None:
            self.violation = violation
        self.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.writable.set()
        self.liveness.stop()
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        lost = self._lost()
        if not self.greeting.done():
            self.greeting.set_exception(lost)
            self.greeting.exception()  # Retrieved: after a cancelled connect nothing awaits it.
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.fail(lost)
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        self.liveness.received()
        if self.violation is not None:
            return
        try:
            for frame in self._decoder.feed(data):
                self._dispatch(frame)
        except ProtocolViolation as violation:
            self.violated(violation)
        except frames.ProtocolError as error:
            self.violated(ProtocolViolation(f"The executor sent an invalid frame: {error}."))

    # Frames from the executor

    def _dispatch(self, frame: frames.Frame) -> None:
        number, kind, payload = frame
        if number == 0:
            self._handle_unrequested(kind, payload)
            return
        stream = self._streams.get(number)
        if stream is None:
            if number > self._last:
                raise ProtocolViolation(f"The executor sent a frame for stream {number}.")
            self._late_frames.count(len(payload))
        elif kind in (frames.OUTPUT, frames.DATA):
            if kind != stream.carries:
                raise ProtocolViolation(f"The executor sent bytes for {stream.op}.")
            stream.window.take(len(payload))
            if kind == frames.OUTPUT:
                self._handle_output(stream, payload)
            elif stream.inbox is None or not payload:
                raise ProtocolViolation(f"The executor sent no bytes for {stream.op}.")
            else:
                stream.inbox.put(payload, len(payload))
        elif kind == frames.END:
            answer = _answer(stream, validation.decoded(payload))
            self._streams.pop(number, None)
            stream.finish(answer)
        elif kind == frames.EVENT:
            _handle_event(stream, payload)
        elif kind == frames.CREDIT:
            stream.credited(frames.decode_credit(payload))
        elif kind == frames.ERROR:
            error = messages.refused(stream.op, validation.decoded(payload))
            self._streams.pop(number, None)
            stream.fail(error)
        else:
            raise ProtocolViolation(f"The executor sent a frame of kind {kind} for a request.")

    def _handle_output(self, stream: Stream, payload: bytes) -> None:
        sequence, channel, data = frames.decode_output(payload)
        if stream.inbox is not None:
            # Credited when the reader takes it.
            stream.inbox.put(Piece(sequence, channel, data), len(payload))
            return
        if stream.intake is not None:
            data = stream.intake.take(sequence, channel, data)
        if stream.listener is not None and data:
            stream.listener.output(sequence, channel, data)
        stream.owed += len(payload)
        if stream.owed >= frames.WINDOW // 2:
            self.grant(stream, stream.owed)
            stream.owed = 0

    def _handle_unrequested(self, kind: int, payload: bytes) -> None:
        """A frame that belongs to no request: the hello, or an event of the executor itself."""
        greeted = self.greeting.done()
        if kind == frames.HELLO and not greeted:
            self.greeting.set_result(messages.hello(validation.decoded(payload)))
        elif kind == frames.ERROR and not greeted:
            self.greeting.set_exception(messages.refused("hello", validation.decoded(payload)))
        elif kind == frames.EVENT and len(payload) <= messages.SHORT_EVENT:
            self._events.count()
            zygote = messages.zygote(validation.decoded(payload))
            # The hello names the current zygote; an earlier event is outdated by then.
            if greeted and zygote is not None:
                for observer in self._zygote_observers:
                    observer(zygote)
        else:
            raise ProtocolViolation(f"The executor sent a frame of kind {kind} for no request.")

    # Frames to the executor

    def _lost(self) -> LinkLost:
        return self.violation or LinkLost("The connection to the executor was lost.")

    def write(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            raise self._lost()
        if self._notifications:
            data = bytes(self._notifications) + data
            self._notifications.clear()
        self._transport.write(data)

    def grant(self, stream: Stream, count: int) -> None:
        stream.window.grant(count)
        if self._transport is not None and not self._transport.is_closing():
            body = frames.CREDIT_BODY.pack(count)
            self._transport.write(frames.encode(stream.number, frames.CREDIT, body))

    def open(
        self,
        op: str,
        request: dict[str, Any],
        reader: Reader = NO_READER,
        *,
        sends: bool = False,
        vital: bool = True,
    ) -> Stream:
        """
        Send a request; with `sends`, bytes will follow it. One stream too many would end the
        connection and all requests on it, so requests that are not vital are refused early.
        """
        if not (vital and op in _VITAL):
            if len(self._streams) >= MAX_STREAMS - RESERVED_STREAMS:
                raise LinkSaturated(
                    "The session has too many open requests. Retry in a few seconds."
                )
            if self._transport and self._transport.get_write_buffer_size() > MAX_UNSENT:
                raise LinkSaturated(
                    "The session does not read its requests. Retry in a few seconds."
                )
        stream = Stream(self._next_number(), op, reader, sends=sends)
        self.write(frames.encode_json(stream.number, frames.OPEN, {"op": op, **request}))
        self._streams[stream.number] = stream
        return stream

    def _next_number(self) -> int:
        self._last = self._last % 0xFFFF_FFFE + 1
        return self._last

    def reset(self, stream: Stream) -> None:
        """Drop the request unless it was answered."""
        if self._streams.pop(stream.number, None) is not None and self.alive:
            self._late_frames.add_room()
            self.write(frames.encode(stream.number, frames.RESET))

    def notify(self, op: str, request: dict[str, Any]) -> None:
        """Send a request without an answer, together with the next one or a moment later."""
        if self.alive:
            number = self._next_number()
            self._notifications += frames.encode_json(number, frames.OPEN, {"op": op, **request})
            if len(self._notifications) > frames.CHUNK:
                self.write(b"")
            elif self._notify_timer is None:
                self._notify_timer = self._loop.call_later(NOTIFY_DELAY, self._send_notifications)

    def _send_notifications(self) -> None:
        self._notify_timer = None
        if self._notifications and self.alive:
            self.write(b"")


def _answer(stream: Stream, content: dict[str, Any]) -> dict[str, Any]:
    if stream.op in _RUNS:
        return cast("dict[str, Any]", messages.result(content, stream.intake))
    return messages.answer(stream.op, content)


def _handle_event(stream: Stream, payload: bytes) -> None:
    if stream.op not in _RUNS:
        if stream.inbox is None:
            raise ProtocolViolation(f"The executor sent an event for {stream.op}.")
        # Limited by the inbox and not by a rate: there is an event for each file.
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
