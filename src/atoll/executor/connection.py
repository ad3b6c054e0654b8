"""
One connection of a control plane: frames in both directions, with credit.

A stream sends only as many bytes as the other end has granted, so the number of streams bounds the
buffered data. Frames are sent at the end of the loop's turn; events may wait a little longer, to
travel with the next frame.
"""

from __future__ import annotations

import _socket

from ..protocol import frames
from ..protocol.limits import MAX_STREAMS
from .event_loop import READ, WRITE, Loop, receive

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

LAZY_DELAY = 0.002


class Refusal(Exception):
    """A request that is answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class StreamHandler:
    """Serves what the other end sends after a request. Subclasses override what they need."""

    __slots__ = ()

    def received(self, data: bytes) -> None: ...

    def finished(self) -> None:
        """No more data will come."""

    def credited(self) -> None:
        """The stream's credit has grown."""

    def dropped(self) -> None:
        """The client resets the stream, or the connection was closed."""


NO_HANDLER = StreamHandler()


class Stream:
    """The executor's end of one request."""

    def __init__(self, connection: Connection, number: int) -> None:
        self.connection = connection
        self.number = number
        self.credit = frames.WINDOW
        self.handler = NO_HANDLER

    def handle(self, handler: StreamHandler) -> None:
        """From now on `handler` serves this stream, in place of an earlier one."""
        self.handler = handler

    def send(self, kind: int, payload: bytes) -> None:
        """Send DATA or OUTPUT; the caller has checked the credit."""
        self.credit -= len(payload)
        self.connection.write(frames.encode(self.number, kind, payload))

    def event(self, value: Any) -> None:
        self.connection.write(frames.encode_json(self.number, frames.EVENT, value), lazy=True)

    def end(self, value: Any) -> None:
        self.connection.close_stream(self.number)
        self.connection.write(frames.encode_json(self.number, frames.END, value))

    def error(self, code: str, message: str) -> None:
        self.connection.close_stream(self.number)
        value = {"code": code, "message": message}
        self.connection.write(frames.encode_json(self.number, frames.ERROR, value))

    def grant(self, count: int) -> None:
        body = frames.CREDIT_BODY.pack(count)
        self.connection.write(frames.encode(self.number, frames.CREDIT, body))


class Connection:
    def __init__(
        self,
        loop: Loop,
        socket: _socket.socket,
        hello: Callable[[Connection, dict[str, Any]], bool],
        request: Callable[[Stream, dict[str, Any]], None],
        closed: Callable[[Connection], None],
    ) -> None:
        self._loop = loop
        self._socket = socket
        self._fd = socket.fileno()
        self._decoder = frames.Decoder()
        self._out = bytearray()
        self._streams: dict[int, Stream] = {}
        self._on_hello = hello
        self._on_request = request
        self._on_closed = closed
        self.greeted = False
        """Whether the connection's hello was accepted."""
        self._flush_due = False
        self._lazy = loop.after(0, lambda: None)
        self._lazy.cancel()
        self._writing = False
        self.open = True
        loop.add(self._fd, READ, self._ready)

    def _ready(self, mask: int) -> None:
        if mask & WRITE:
            self._flush()
        if mask & ~WRITE and self.open:
            data = receive(self._socket, 262_144)
            if data is None:
                return
            if not data:
                self.close()
                return
            try:
                for frame in self._decoder.feed(data):
                    self._dispatch(frame)
            except frames.ProtocolError:
                self.close()

    def _dispatch(self, frame: frames.Frame) -> None:
        number, kind, payload = frame
        if kind == frames.HELLO:
            self.greeted = self._on_hello(self, frames.decode_json(payload))
            return
        if not self.greeted:
            raise frames.ProtocolError("the first frame must be a HELLO that is accepted")
        if kind == frames.OPEN:
            if number in self._streams or len(self._streams) >= MAX_STREAMS:
                raise frames.ProtocolError("stream %d cannot be opened" % number)
            stream = self._streams[number] = Stream(self, number)
            self._on_request(stream, frames.decode_json(payload))
            return
        found = self._streams.get(number)
        if found is None:
            return  # The stream has ended while this frame was in flight.
        if kind == frames.DATA:
            found.handler.received(payload)
        elif kind == frames.FINISH:
            found.handler.finished()
        elif kind == frames.CREDIT:
            found.credit += frames.decode_credit(payload)
            found.handler.credited()
        elif kind == frames.RESET:
            self.close_stream(number)
            found.handler.dropped()

    def close_stream(self, number: int) -> None:
        self._streams.pop(number, None)

    def write(self, data: bytes, lazy: bool = False) -> None:
        if not self.open:
            return
        self._out += data
        if self._flush_due or self._writing:
            return
        if not lazy:
            self._flush_due = True
            self._loop.at_end_of_turn(self._flush)
        elif self._lazy.call is None:
            self._lazy = self._loop.after(LAZY_DELAY, self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        self._lazy.cancel()
        if not self.open or not self._out:
            return
        try:
            del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if bool(self._out) != self._writing:
            self._writing = bool(self._out)
            self._loop.change(self._fd, READ | WRITE if self._writing else READ)

    @property
    def flushed(self) -> bool:
        """Whether all written frames have been sent."""
        return not self._out

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        self._lazy.cancel()
        self._loop.remove(self._fd)
        self._socket.close()
        streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.handler.dropped()
        self._on_closed(self)
