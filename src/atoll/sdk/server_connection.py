"""HTTP to a server. The only module of the client that imports the HTTP client, when it is used."""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx

from atoll.errors import InvalidRequest
from atoll.sdk.connection import ServerUnreachable, server_timeout
from atoll.sdk.tls_errors import tls_error, unreachable_message
from atoll.version import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Mapping

    from atoll.sdk.endpoint import Endpoint

_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=64)


class ServerConnection:
    def __init__(self, endpoint: Endpoint, connect_timeout: float) -> None:
        self._endpoint = endpoint
        self._connect_timeout = connect_timeout
        self._has_responded = False
        headers = {"user-agent": f"atoll-python/{__version__}", "accept": "*/*"}
        if endpoint.key is not None:
            headers["authorization"] = f"Bearer {endpoint.key}"
        transport: httpx.AsyncBaseTransport | None = None
        if endpoint.loopback:
            # An explicit transport ignores proxies from the environment.
            transport = httpx.AsyncHTTPTransport(limits=_LIMITS, verify=_trust(endpoint))
        self._client = httpx.AsyncClient(
            base_url=f"{endpoint.url}/api/v1/", headers=headers, transport=transport, limits=_LIMITS
        )

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        target: str,
        *,
        content: bytes | AsyncIterable[bytes] | None,
        headers: Mapping[str, str],
        timeout: float,
    ) -> AsyncIterator[httpx.Response]:
        name = self._endpoint.name
        limits = httpx.Timeout(timeout, connect=self._connect_timeout, pool=None)
        try:
            async with self._client.stream(
                method, target, content=content, headers=headers, timeout=limits
            ) as response:
                self._has_responded = True
                yield response
        except httpx.ConnectTimeout:
            raise ServerUnreachable(
                f"{name} did not accept a connection in time.", sent=False
            ) from None
        except httpx.TimeoutException:
            raise server_timeout(name, method, target, timeout) from None
        except httpx.LocalProtocolError as error:
            raise InvalidRequest(f"Invalid request: {error}") from None
        except httpx.TransportError as error:
            sent = not isinstance(error, httpx.ConnectError)
            raise (
                await tls_error(self._endpoint, error, probe=sent and not self._has_responded)
                or ServerUnreachable(unreachable_message(self._endpoint, error), sent=sent)
            ) from None


def _trust(endpoint: Endpoint) -> ssl.SSLContext | bool:
    """
    The certificate authorities of this machine, which take 25 ms to load; none for plain HTTP.
    """
    return True if endpoint.encrypted else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
