"""
Parser for server-sent events.

Splits lines only at line feeds. `str.splitlines` would also split at U+2028 and similar characters,
which JSON does not escape.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll.sdk.decode import decode
from atoll.sdk.displays import Display
from atoll.sdk.values import Approval, Event, Result, Retry

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable


READ_TIMEOUT = 45.0
"""Seconds without data before a stream counts as broken. The server pings every 15 s."""
STABLE_AFTER = 1.0
"""Seconds after which a connection shows that the server is available, even if it breaks."""


class Message(NamedTuple):
    """A message without data only updates the position of the stream."""

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
            if "data" in fields or "id" in fields:
                name = fields.get("event", "message")
                yield Message(fields.get("id", ""), name, fields.get("data", ""))
            fields = {}


async def events(chunks: AsyncIterable[bytes], execution_id: str = "") -> AsyncIterator[Event]:
    """Events of an execution. Skips kinds that this client does not know."""
    async for message in messages(chunks):
        read = _READERS.get(message.event)
        if read is not None:
            sequence = int(message.id) if message.id.isdecimal() else 0
            content = json.loads(message.data)
            yield Event(sequence, execution_id=execution_id, **read(content))


def _output(kind: str) -> Callable[[Any], dict[str, Any]]:
    def read(content: Any) -> dict[str, Any]:
        if "base64" in content:
            return {"kind": kind, "data": base64.b64decode(content["base64"])}
        return {"kind": kind, "data": content["text"].encode("utf-8", "surrogatepass")}

    return read


_READERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "queued": lambda content: {"kind": "queued", "ahead": content.get("ahead")},
    "started": lambda content: {"kind": "started", "attempt": content.get("attempt")},
    "stdout": _output("stdout"),
    "stderr": _output("stderr"),
    "display": lambda content: {"kind": "display", "display": decode(Display, content)},
    "approval": lambda content: {"kind": "approval", "approval": decode(Approval, content)},
    "heartbeat": lambda content: {"kind": "heartbeat"},
    "retry": lambda content: {"kind": "retry", "retry": decode(Retry, content)},
    "result": lambda content: {"kind": "result", "result": decode(Result, content)},
}


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[str]:
    pending = bytearray()
    async for chunk in chunks:
        start = len(pending)
        pending += chunk
        while (end := pending.find(b"\n", start)) >= 0:
            yield pending[:end].removesuffix(b"\r").decode()
            del pending[: end + 1]
            start = 0
