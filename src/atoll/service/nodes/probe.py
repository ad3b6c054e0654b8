"""
Asks another node over HTTP whether it is healthy, and authenticates such requests.

A probe goes to the address that the node reports. Its token names the node and the time, so only
replicas of the same database get an answer, and a token that leaks is useless a minute later.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from typing import TYPE_CHECKING

from atoll.errors import Unauthenticated
from atoll.service.auth.signing import Signer, derive_key

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

    import httpx

    from atoll.clock import Clock
    from atoll.model.node import Node

PATH = "/internal/node"
MAX_CLOCK_SKEW = 60
"""Seconds before and after its time during which a token is valid."""
MAX_RESPONSE = 65_536
"""Bytes."""
MAX_PROBLEM = 300
"""Characters."""


class NodeProbe:
    def __init__(
        self, secret: str, clock: Clock, timeout: timedelta, ca_file: Path | None = None
    ) -> None:
        """`ca_file` has the trusted authorities; those of the system if null."""
        self._signer = Signer(derive_key(secret, "atoll node probe 1"), hexadecimal=True)
        self._clock = clock
        self._timeout = timeout.total_seconds()
        self._ca_file = ca_file
        self._tls: ssl.SSLContext | None = None

    def token(self, node_id: str) -> str:
        at = int(self._clock.now().timestamp())
        return f"{at}.{self._signer.sign(f'{node_id} {at}'.encode())}"

    def verify(self, token: str, node_id: str) -> None:
        """Raise `Unauthenticated` unless the token is for this node and this time."""
        at, _, signature = token.partition(".")
        valid = (
            at.isascii()
            and at.isdigit()
            and len(at) <= 12
            and abs(self._clock.now().timestamp() - int(at)) <= MAX_CLOCK_SKEW
            and self._signer.verifies(signature, f"{node_id} {int(at)}".encode())
        )
        if not valid:
            raise Unauthenticated("This route needs a probe token.", code="token_unknown")

    async def problem_of(self, node: Node) -> str | None:
        """Why a node is unhealthy, as it reports or as is observed; null if it is healthy."""
        import httpx

        headers = {"Authorization": f"Bearer {self.token(node.id)}"}
        try:
            # A new connection for each probe: a kept one may lead to a process that is gone.
            async with (
                asyncio.timeout(self._timeout),
                httpx.AsyncClient(
                    timeout=self._timeout, trust_env=False, verify=await self._verify(node.url)
                ) as http,
            ):
                return await self._ask(http, node, headers)
        except TimeoutError:
            return f"no answer from {node.url} within {self._timeout:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            return f"no answer from {node.url}: {type(error).__name__} {error}"[:MAX_PROBLEM]

    async def _verify(self, url: str) -> ssl.SSLContext | bool:
        """Made once, because it takes long."""
        if not url.startswith("https:"):
            return False
        if self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context, cafile=self._ca_file)
        return self._tls

    async def _ask(
        self, http: httpx.AsyncClient, node: Node, headers: dict[str, str]
    ) -> str | None:
        async with http.stream("GET", f"{node.url}{PATH}", headers=headers) as response:
            body = b""
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > MAX_RESPONSE:
                    raise ValueError("the response is too long")
        report = json.loads(body)
        if response.status_code not in (200, 503) or not isinstance(report, dict):
            return f"{node.url} answers with status {response.status_code}"
        if report.get("id") != node.id:
            return f"another node answers at {node.url} (set ATOLL_NODE__URL on each node)"
        problem = report.get("problem")
        return None if problem is None else str(problem)[:MAX_PROBLEM]
