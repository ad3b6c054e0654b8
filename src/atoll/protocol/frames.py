"""
The frames of the executor protocol: length, stream id, kind, payload.

Both ends use this codec. It keeps at most one incomplete frame, refuses a length beyond
the limit of its kind before any of it is stored, and leaves the meaning of a payload to others.
docs/reference/executor-protocol.md describes the conversation.
"""

from __future__ import annotations

import struct

from . import minijson

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Frame = tuple[int, int, bytes]
    """Stream, kind, payload."""

VERSION = 1
FEATURES = ("run", "attach", "files", "processes")

MAX_PAYLOAD = 32 * 1024 * 1024
CHUNK = 64 * 1024
WINDOW = 256 * 1024

HELLO = 1  # both ways, JSON: versions and features
OPEN = 2  # to the executor, JSON: a request on a new stream
DATA = 3  # both ways, bytes: content of a file
OUTPUT = 4  # from the executor: sequence number, channel, bytes of a run
EVENT = 5  # from the executor, JSON: something happened to a run
END = 6  # from the executor, JSON: the request is answered, the stream is closed
ERROR = 7  # from the executor, JSON: code and message, the stream is closed
CREDIT = 8  # both ways: so many more bytes of DATA or OUTPUT may be sent on this stream
FINISH = 9  # to the executor: no more DATA will come
RESET = 10  # to the executor: drop the stream; what it was doing is undone or left to itself

KINDS = frozenset((HELLO, OPEN, DATA, OUTPUT, EVENT, END, ERROR, CREDIT, FINISH, RESET))

EVERY_KIND = dict.fromkeys(KINDS, MAX_PAYLOAD)

STDOUT = 1
STDERR = 2
VALUE = 3  # what the process wrote about its own result: the return value, or an error
APPROVAL = 4  # JSON: a question to a person, and what became of it
DISPLAY = 5  # JSON: a MIME bundle that a context shows

HEADER = struct.Struct("!IIB")
OUTPUT_HEADER = struct.Struct("!IB")
CREDIT_BODY = struct.Struct("!I")
EXTENT = struct.Struct("!QI")
"""Offset and length of the bytes of a file that follow; length 0 ends the file."""


class ProtocolError(Exception):
    """The peer does not speak this protocol; the connection is of no more use."""


def encode(stream: int, kind: int, payload: bytes = b"") -> bytes:
    if len(payload) > MAX_PAYLOAD:
        raise ProtocolError("a payload of %d bytes is too large" % len(payload))
    return HEADER.pack(len(payload), stream, kind) + payload


def encode_json(stream: int, kind: int, value: Any) -> bytes:
    return encode(stream, kind, minijson.dumps(value))


def decode_json(payload: bytes) -> Any:
    """A JSON object; anything else, however deep or odd, is a `ProtocolError`."""
    try:
        value = minijson.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a payload is not JSON: %s" % error) from None
    if not isinstance(value, dict):
        raise ProtocolError("a payload is not a JSON object")
    return value


def decode_output(payload: bytes) -> tuple[int, int, bytes]:
    """Sequence number, channel and bytes of an OUTPUT frame."""
    if len(payload) < OUTPUT_HEADER.size:
        raise ProtocolError("an OUTPUT frame is too short")
    sequence, channel = OUTPUT_HEADER.unpack_from(payload)
    return sequence, channel, payload[OUTPUT_HEADER.size :]


def decode_credit(payload: bytes) -> int:
    if len(payload) != CREDIT_BODY.size:
        raise ProtocolError("a CREDIT frame has %d bytes" % len(payload))
    return int(CREDIT_BODY.unpack(payload)[0])


class Decoder:
    """Bytes in, whole frames out; `limits` are the kinds that may come, and their most bytes."""

    def __init__(self, limits: dict[int, int] = EVERY_KIND) -> None:
        self._buffer = bytearray()
        self._limits = limits

    def feed(self, data: bytes) -> list[Frame]:
        buffer = self._buffer
        buffer += data
        frames: list[Frame] = []
        position = 0
        size = len(buffer)
        while size - position >= HEADER.size:
            length, stream, kind = HEADER.unpack_from(buffer, position)
            limit = self._limits.get(kind)
            if limit is None:
                raise ProtocolError("kind %d is not known" % kind)
            if length > limit:
                raise ProtocolError("a frame of kind %d announces %d bytes" % (kind, length))
            end = position + HEADER.size + length
            if end > size:
                break
            frames.append((stream, kind, bytes(buffer[position + HEADER.size : end])))
            position = end
        if position:
            del buffer[:position]
        return frames
