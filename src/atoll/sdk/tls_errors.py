"""
Why a server did not answer: wrong scheme, a certificate that is not trusted, or not reachable.

A client that speaks HTTP to a TLS port, or TLS to an HTTP port, gets an error that names the right
URL, whatever the server or its proxy made of the request.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from atoll.errors import AtollError, InvalidRequest, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from atoll.sdk.endpoint import Endpoint

_PROBE_TIMEOUT = 2.0
_NOT_TLS = re.compile(r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE|record layer failure")
_TLS_ALERT = "\\x15\\x03"
"""How a TLS alert begins, as HTTP clients quote what they cannot parse."""
_WANTS_TLS = re.compile(rb"https|ssl-enabled", re.IGNORECASE)
"""In the answers of nginx, Apache and Go servers to plain HTTP on a TLS port."""


def unreachable_message(endpoint: Endpoint, error: Exception) -> str:
    return (
        f"No server answers at {endpoint.name}: {str(error) or type(error).__name__}. "
        "Start one with `atoll serve`, or name another one (ATOLL_URL)."
    )


async def tls_error(endpoint: Endpoint, error: Exception, *, probe: bool) -> AtollError | None:
    """
    The error for a connection that failed because of TLS; None when TLS is not the reason.

    With `probe`, a server that closed the connection without an answer is asked for TLS.
    """
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return TemporaryError(
            f"The certificate of {endpoint.name} is not trusted: {error}. "
            "Set SSL_CERT_FILE to the authority that signed it.",
            code="certificate_untrusted",
        )
    if endpoint.encrypted:
        return _wrong_scheme(endpoint) if _NOT_TLS.search(str(error)) else None
    if _TLS_ALERT in str(error) or (probe and await _speaks_tls(endpoint)):
        return _wrong_scheme(endpoint)
    return None


def wrong_scheme_error(
    endpoint: Endpoint, status: int, headers: Mapping[str, str], body: bytes
) -> AtollError | None:
    """The error for an answer that only asks for HTTPS."""
    if endpoint.encrypted or endpoint.url is None:
        return None
    redirected = 300 <= status < 400 and headers.get("location", "").startswith("https://")
    problem = headers.get("content-type", "").startswith("application/problem+json")
    if redirected or (status == 400 and not problem and _WANTS_TLS.search(body)):
        return _wrong_scheme(endpoint)
    return None


def _wrong_scheme(endpoint: Endpoint) -> InvalidRequest:
    given, right = ("https", "http") if endpoint.encrypted else ("http", "https")
    url = right + (endpoint.url or "").removeprefix(given)
    reason = "does not use TLS" if endpoint.encrypted else "uses TLS"
    return InvalidRequest(
        f"The server at {endpoint.name} {reason}: write {url}", code="wrong_scheme", field="url"
    )


async def _speaks_tls(endpoint: Endpoint) -> bool:
    parts = urlsplit(endpoint.url or "")
    # Nothing is sent but the handshake, so it does not matter who answers.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_PROBE_TIMEOUT):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, ssl=context)
        writer.transport.abort()
        return True
    return False
