"""
The part of the Protocol Buffers wire format that the messages of CSI need here.

A message to encode has only strings. A decoded one may also have booleans, enumerations, maps of
strings and nested messages. Fields are known by their numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_VARINT, _LENGTH_DELIMITED = 0, 2


@dataclass(frozen=True)
class Message:
    """A field that is not set has the default of its type, as in proto3."""

    fields: Mapping[int, list[int | bytes]]

    def text(self, number: int) -> str:
        value = self.fields.get(number, [b""])[-1]
        assert isinstance(value, bytes), f"Field {number} is a number."
        return value.decode()

    def flag(self, number: int) -> bool:
        return bool(self.fields.get(number, [0])[-1])


def encode(fields: Mapping[int, str]) -> bytes:
    encoded = b""
    for number, text in fields.items():
        data = text.encode()
        encoded += _varint(number << 3 | _LENGTH_DELIMITED) + _varint(len(data)) + data
    return encoded


def decode(data: bytes) -> Message:
    fields: dict[int, list[int | bytes]] = {}
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        value: int | bytes
        value, position = _read_varint(data, position)
        if tag & 7 == _LENGTH_DELIMITED:
            start, position = position, position + value
            value = data[start:position]
        elif tag & 7 != _VARINT:
            raise ValueError(f"Field {tag >> 3} has the unknown wire type {tag & 7}.")
        fields.setdefault(tag >> 3, []).append(value)
    return Message(fields)


def _varint(number: int) -> bytes:
    """Seven bits per byte, the lowest first; the eighth bit is set in all bytes but the last."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*encoded, number])


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number, and the position after it."""
    number = shift = 0
    while True:
        byte = data[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position
