"""
The frames of the executor protocol: length, stream id, kind, payload.

Both ends use this codec. It buffers at most one incomplete frame, and rejects a length beyond the
limit of its kind before it stores any of it. It does not interpret payloads.
docs/reference/executor-protocol.md describes the protocol.
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
EVENT = 5  # from the executor, JSON: an event of a request
END = 6  # from the executor, JSON: the answer; the stream is closed
ERROR = 7  # from the executor, JSON: code and message, the stream is closed
CREDIT = 8  # both ways: how many more bytes of DATA or OUTPUT may be sent
FINISH = 9  # to the executor: no more DATA will come
RESET = 10  # to the executor: drop the stream; a write is undone, a run goes on

KINDS = frozenset((HELLO, OPEN, DATA, OUTPUT, EVENT, END, ERROR, CREDIT, FINISH, RESET))

ALL_KINDS = dict.fromkeys(KINDS, MAX_PAYLOAD)

STDOUT = 1
STDERR = 2
VALUE = 3  # the process's own result: the return value, or an error
APPROVAL = 4  # JSON: a question to a person, or its outcome
DISPLAY = 5  # JSON: a MIME bundle that a context displays

HEADER = struct.Struct("!IIB")
OUTPUT_HEADER = struct.Struct("!IB")
CREDIT_BODY = struct.Struct("!I")
EXTENT = struct.Struct("!QI")
"""Offset and length of the bytes of a file that follow; length 0 ends the file."""


class ProtocolError(Exception):
    """The peer violates the protocol; the connection must be closed."""


def encode(stream: int, kind: int, payload: bytes = b"") -> bytes:
    if len(payload) > MAX_PAYLOAD:
        raise ProtocolError("a payload of %d bytes is too large" % len(payload))
    return HEADER.pack(len(payload), stream, kind) + payload


def encode_json(stream: int, kind: int, value: Any) -> bytes:
    return encode(stream, kind, minijson.dumps(value))


def decode_json(payload: bytes) -> Any:
    """Decode a JSON object; anything else is a `ProtocolError`."""
    try:
        value = minijson.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a payload is invalid JSON: %s" % error) from None
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
    """Splits bytes into frames. `limits` has the accepted kinds and their largest payloads."""

    def __init__(self, limits: dict[int, int] = ALL_KINDS) -> None:
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
                raise ProtocolError("unknown frame kind %d" % kind)
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
