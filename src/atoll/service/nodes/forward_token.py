"""
The token of a request that one node forwards to another, in the header `Atoll-Hop`.

A token is valid for one request: it binds sender and receiver, method, path and query, the time,
and the body. Of a body that is known before it is sent it binds length and SHA-256, otherwise the
length alone. Each token is accepted once. The receiver answers such a request or refuses it, and
never forwards it again.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.errors import Forbidden, TemporaryError
from atoll.service.auth.signing import Signer, base64url, derive_key

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.service.nodes.replay_guard import ReplayGuard

MAX_CLOCK_SKEW = 60
"""Seconds before and after its time during which a token is accepted."""
WRONG_NODE = "wrong_node"
_MAX_LENGTH = 1024
_UNKNOWN = "-"
_FIELDS = 8


@dataclass(frozen=True, slots=True)
class Content:
    """The body of a request, as far as it is known before it is sent."""

    length: int | None
    """Null for a chunked body."""
    digest: str | None = None
    """Null for a body that is forwarded as it arrives."""

    @classmethod
    def of(cls, body: bytes) -> Content:
        return cls(len(body), base64url(hashlib.sha256(body).digest()))


@dataclass(frozen=True, slots=True)
class ForwardToken:
    node_id: str
    """The receiver."""
    scheme: str
    """Scheme of the client's request, for URLs in the response."""
    content: Content


class ForwardTokens:
    def __init__(self, secret: str, node_id: str, clock: Clock, replay_guard: ReplayGuard) -> None:
        self._signer = Signer(derive_key(secret, "atoll hops 2"))
        self._node_id = node_id
        self._clock = clock
        self._replay_guard = replay_guard

    def make(self, token: ForwardToken, method: str, target: bytes) -> str:
        """Value of the header for one request; `target` is its path and query as sent."""
        length, digest = token.content.length, token.content.digest
        fields = [
            token.node_id,
            self._node_id,
            token.scheme,
            str(int(self._clock.now().timestamp())),
            secrets.token_urlsafe(16),
            _UNKNOWN if length is None else str(length),
            digest or _UNKNOWN,
        ]
        return " ".join([*fields, self._signer.sign(_signed(fields, method, target))])

    def verify(self, header: str, method: str, target: bytes) -> ForwardToken:
        """
        The token of a header; `Forbidden` if it is invalid, expired, used before or for another
        request, and `TemporaryError` with code `wrong_node` if it is for another node. Blocking: it
        is recorded in a file.
        """
        *fields, signature = header.split(" ") if len(header) <= _MAX_LENGTH else [""]
        if (
            len(fields) != _FIELDS - 1
            or not header.isascii()
            or not self._signer.verifies(signature, _signed(fields, method, target))
        ):
            raise _refused("the signature does not match this request")
        node_id, _, scheme, at, nonce, length, digest = fields
        content = Content(
            None if length == _UNKNOWN else int(length), None if digest == _UNKNOWN else digest
        )
        if node_id != self._node_id:
            raise TemporaryError(f"This is node {self._node_id}, not {node_id}.", code=WRONG_NODE)
        now = self._clock.now().timestamp()
        if abs(now - int(at)) > MAX_CLOCK_SKEW:
            raise _refused("it has expired; check the clocks of the nodes")
        if not self._replay_guard.claim(nonce, int(at), now):
            raise _refused("it was used before")
        return ForwardToken(node_id, scheme, content)


def _signed(fields: list[str], method: str, target: bytes) -> bytes:
    return "\n".join([*fields, method, ""]).encode() + target


def body_refused() -> Forbidden:
    return _refused("it is for another body")


def _refused(why: str) -> Forbidden:
    return Forbidden(
        f"Invalid Atoll-Hop header: {why}. Only nodes of one Atoll may send this header.",
        code="hop_refused",
    )
