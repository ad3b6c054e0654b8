"""
The token of a request that one node forwards to another, in the header `Atoll-Hop`.

It binds sender and receiver, method, path and query, the time, and the body: by its length and
SHA-256 where all of it is known before it is sent, else by its length alone. It is signed with a
key made of the database's secret, so only the control planes of one database can make it, and each
is accepted once. A request that has one is answered where it came to, or refused; it is never
forwarded again.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.errors import Forbidden, TemporaryError

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.service.nodes.replay_guard import ReplayGuard

LIFETIME = 60
"""Seconds that a token is accepted before and after its time: clocks differ."""
WRONG_NODE = "wrong_node"
_PURPOSE = b"atoll hops 2"
_MAX_LENGTH = 1024
_UNKNOWN = "-"
_FIELDS = 8


@dataclass(frozen=True, slots=True)
class Content:
    """The body of a request, as far as it is known before it is sent."""

    length: int | None
    """None for one that is sent in pieces until it ends."""
    digest: str | None = None
    """None where it is forwarded as it comes."""

    @classmethod
    def of(cls, body: bytes) -> Content:
        return cls(len(body), _text(hashlib.sha256(body).digest()))


@dataclass(frozen=True, slots=True)
class ForwardToken:
    node_id: str
    """The node that is to answer."""
    scheme: str
    """The scheme of the client's own request, for links in the answer."""
    content: Content


class ForwardTokens:
    def __init__(self, secret: str, node_id: str, clock: Clock, nonces: ReplayGuard) -> None:
        self._key = hmac.digest(secret.encode(), _PURPOSE, "sha256")
        self._node_id = node_id
        self._clock = clock
        self._nonces = nonces

    def make(self, hop: ForwardToken, method: str, target: bytes) -> str:
        """The header for one request; `target` is its path and query as they are sent."""
        length, digest = hop.content.length, hop.content.digest
        fields = [
            hop.node_id,
            self._node_id,
            hop.scheme,
            str(int(self._clock.now().timestamp())),
            secrets.token_urlsafe(16),
            _UNKNOWN if length is None else str(length),
            digest or _UNKNOWN,
        ]
        return " ".join([*fields, self._signature(fields, method, target)])

    def read(self, header: str, method: str, target: bytes) -> ForwardToken:
        """
        `Forbidden` unless a control plane of this database made it for this request and this time,
        and it was not accepted before; `wrong_node` if it is for another node. Blocking: it is
        recorded in a file.
        """
        *fields, signature = header.split(" ") if len(header) <= _MAX_LENGTH else [""]
        if (
            len(fields) != _FIELDS - 1
            or not header.isascii()
            or not hmac.compare_digest(self._signature(fields, method, target), signature)
        ):
            raise _refused("it was not made by one of them for this request")
        node_id, _, scheme, at, nonce, length, digest = fields
        content = Content(
            None if length == _UNKNOWN else int(length), None if digest == _UNKNOWN else digest
        )
        if node_id != self._node_id:
            raise TemporaryError(f"This is node {self._node_id}, not {node_id}.", code=WRONG_NODE)
        now = self._clock.now().timestamp()
        if abs(now - int(at)) > LIFETIME:
            raise _refused("it is of another time; check the clocks of the nodes")
        if not self._nonces.claim(nonce, int(at), now):
            raise _refused("it was used before")
        return ForwardToken(node_id, scheme, content)

    def _signature(self, fields: list[str], method: str, target: bytes) -> str:
        signed = "\n".join([*fields, method, ""]).encode() + target
        return _text(hmac.new(self._key, signed, hashlib.sha256).digest())


def body_refused() -> Forbidden:
    return _refused("it was made for another body")


def _refused(why: str) -> Forbidden:
    return Forbidden(
        f"The header Atoll-Hop is for the servers of this Atoll; leave it out ({why}).",
        code="hop_refused",
    )


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
