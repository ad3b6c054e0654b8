"""Responses with which a node refuses a request that another node may be able to serve."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.api.rest.problems import NODE_REFUSALS
from atoll.errors import InstanceNotStarted, NodeFull, NodeUnreachable
from atoll.service.nodes.forward_token import WRONG_NODE

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import Message, Send

CANNOT_START = frozenset(
    {"engine_unavailable", "node_cordoned", InstanceNotStarted.code, NodeFull.code}
)
"""Codes of a node that does not start a session; another one might."""
CANNOT_CREATE = CANNOT_START | {WRONG_NODE, NodeUnreachable.code}


@dataclass(frozen=True, slots=True)
class Refusal:
    """A response that was not sent to the client yet."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def code(self) -> str | None:
        try:
            content = json.loads(self.body)
        except ValueError:
            return None
        return content.get("code") if isinstance(content, dict) else None

    async def send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


class RefusalFilter:
    """
    Sends a response of this node to the client, unless it is a refusal with one of some codes: that
    is kept as `refusal`.
    """

    def __init__(self, send: Send, codes: Collection[str]) -> None:
        self._send = send
        self._codes = codes
        self._start: Message | None = None
        self._body = b""
        self.refusal: Refusal | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] in NODE_REFUSALS:
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if message.get("more_body"):
                return
            start, self._start = self._start, None
            refusal = Refusal(start["status"], list(start.get("headers", ())), self._body)
            if refusal.code in self._codes:
                self.refusal = refusal
            else:
                await refusal.send(self._send)
