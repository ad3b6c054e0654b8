"""
How one node asks another whether it is well, and how that is answered.

The question goes to the address that the node tells and bears a token made of the database's
secret, which names the node that is asked and the time: who is not of this database learns nothing,
and one that was overheard is of no use a minute later. An answer of another node is none.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import ssl
from typing import TYPE_CHECKING

import httpx

from atoll.errors import Unauthenticated

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

    from atoll.clock import Clock
    from atoll.model.node import Node

PATH = "/internal/node"
LIFE = 60
"""Seconds that a token is taken, before and after its time: clocks differ."""
MOST = 65_536
"""Bytes of an answer."""
LONGEST = 300
"""Characters of a problem."""
_PURPOSE = b"atoll node probe 1"


class NodeProbe:
    def __init__(
        self, secret: str, clock: Clock, timeout: timedelta, ca_file: Path | None = None
    ) -> None:
        """`ca_file` has the authorities of the nodes' certificates, if not the system's."""
        self._key = hmac.digest(secret.encode(), _PURPOSE, "sha256")
        self._clock = clock
        self._timeout = timeout.total_seconds()
        self._ca_file = ca_file
        self._tls: ssl.SSLContext | None = None

    def token(self, node_id: str) -> str:
        at = int(self._clock.now().timestamp())
        return f"{at}.{self._signature(node_id, at)}"

    def check(self, token: str, node_id: str) -> None:
        """Raise `Unauthenticated` unless it is one for this node and now."""
        at, _, signature = token.partition(".")
        known = at.isascii() and at.isdigit() and len(at) <= 12 and signature.isascii()
        if known:
            known = abs(self._clock.now().timestamp() - int(at)) <= LIFE
        if not known or not hmac.compare_digest(self._signature(node_id, int(at)), signature):
            raise Unauthenticated("This needs the token of a probe.", code="token_unknown")

    def _signature(self, node_id: str, at: int) -> str:
        return hmac.new(self._key, f"{node_id} {at}".encode(), "sha256").hexdigest()

    async def ask(self, node: Node) -> str | None:
        """What is wrong with a node, as it says or as is found; none when it is well."""
        headers = {"Authorization": f"Bearer {self.token(node.id)}"}
        try:
            # A connection of its own: one that is kept open may be to a node that is gone.
            async with (
                asyncio.timeout(self._timeout),
                httpx.AsyncClient(
                    timeout=self._timeout, trust_env=False, verify=await self._trust(node.url)
                ) as http,
            ):
                return await self._answer(http, node, headers)
        except TimeoutError:
            return f"no answer from {node.url} within {self._timeout:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return f"no answer from {node.url}: {type(error).__name__} {error}"[:LONGEST]

    async def _trust(self, url: str) -> ssl.SSLContext | bool:
        """Whose certificates are taken; made once, as it takes long."""
        if not url.startswith("https:"):
            return False
        if self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context, cafile=self._ca_file)
        return self._tls

    async def _answer(
        self, http: httpx.AsyncClient, node: Node, headers: dict[str, str]
    ) -> str | None:
        async with http.stream("GET", f"{node.url}{PATH}", headers=headers) as response:
            body = b""
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > MOST:
                    raise ValueError("the answer is too long")
        told = json.loads(body)
        if response.status_code not in (200, 503) or not isinstance(told, dict):
            return f"{node.url} answers with status {response.status_code}"
        if told.get("id") != node.id:
            return f"another node answers at {node.url} (set ATOLL_NODE__URL on each)"
        problem = told.get("problem")
        return None if problem is None else str(problem)[:LONGEST]
