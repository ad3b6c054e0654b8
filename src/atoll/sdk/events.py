"""
Server-sent events, from bytes to `Event`.

Lines end at line feeds alone: the general rules of text would also split at U+2028 and its kin,
which JSON leaves as they are.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, NamedTuple

from atoll.sdk.decode import decode
from atoll.sdk.displays import Display
from atoll.sdk.values import Event, Result

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator


class Message(NamedTuple):
    id: str
    event: str
    data: str


async def messages(chunks: AsyncIterable[bytes]) -> AsyncIterator[Message]:
    fields: dict[str, str] = {}
    async for line in _lines(chunks):
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data" and "data" in fields:
                value = f"{fields['data']}\n{value}"
            fields[name] = value
        else:
            if "data" in fields:
                yield Message(fields.get("id", ""), fields.get("event", "message"), fields["data"])
            fields = {}


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[Event]:
    """Kinds of events that this client does not know are left out."""
    async for message in messages(chunks):
        sequence = int(message.id) if message.id.isdecimal() else 0
        if message.event == "started":
            yield Event(sequence, "started")
        elif message.event in ("stdout", "stderr"):
            payload = json.loads(message.data)
            data = (
                base64.b64decode(payload["base64"])
                if "base64" in payload
                else payload["text"].encode("utf-8", "surrogatepass")
            )
            yield Event(sequence, "stdout" if message.event == "stdout" else "stderr", data)
        elif message.event == "display":
            shown = decode(Display, json.loads(message.data))
            yield Event(sequence, "display", display=shown)
        elif message.event == "result":
            yield Event(sequence, "result", result=decode(Result, json.loads(message.data)))


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[str]:
    pending = bytearray()
    async for chunk in chunks:
        start = len(pending)
        pending += chunk
        while (end := pending.find(b"\n", start)) >= 0:
            yield pending[:end].removesuffix(b"\r").decode()
            del pending[: end + 1]
            start = 0
