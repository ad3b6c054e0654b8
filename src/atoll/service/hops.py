"""
The mark of a request that one node passes on to another.

It names the node that is to answer and is signed with a key made of the database's secret, so only
the control planes of one database can make it. A request that has it is answered where it came to,
or refused; it is never passed on again.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from dataclasses import dataclass

from atoll.errors import Forbidden

_PURPOSE = b"atoll hops 1"
_MAX = 1024
SCHEMES = ("http", "https")


@dataclass(frozen=True, slots=True)
class Hop:
    node_id: str
    """Who is to answer."""
    scheme: str
    """How the client came, for the links that it is told."""


class Hops:
    def __init__(self, secret: str) -> None:
        self._key = hmac.digest(secret.encode(), _PURPOSE, "sha256")

    def make(self, hop: Hop, method: str, target: bytes) -> str:
        """The header for one request; `target` is its path and query as they are sent."""
        return f"{hop.node_id} {hop.scheme} {self._signature(hop, method, target)}"

    def read(self, header: str, method: str, target: bytes) -> Hop:
        """`Forbidden` when no control plane of this database made it for this request."""
        node_id, scheme, signature = ([*header.split(" ", 2), "", ""])[:3]
        hop = Hop(node_id, scheme)
        if (
            len(header) > _MAX
            or not header.isascii()
            or scheme not in SCHEMES
            or not hmac.compare_digest(self._signature(hop, method, target), signature)
        ):
            raise Forbidden(
                "The header Atoll-Hop is for the servers of this Atoll; leave it out.",
                code="hop_refused",
            )
        return hop

    def _signature(self, hop: Hop, method: str, target: bytes) -> str:
        said = f"{hop.node_id}\n{hop.scheme}\n{method}\n".encode() + target
        signed = hmac.new(self._key, said, hashlib.sha256).digest()
        return base64.urlsafe_b64encode(signed).decode().rstrip("=")
