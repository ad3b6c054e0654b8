"""
Errors for failed connections: TLS mismatch, untrusted certificate, unreachable server.

A client that uses HTTP on a TLS port, or the other way round, gets an error with the right URL.
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
"""The beginning of a TLS alert, as HTTP clients quote invalid responses."""
_WANTS_TLS = re.compile(rb"https|ssl-enabled", re.IGNORECASE)
"""Responses of nginx, Apache and Go servers to plain HTTP on a TLS port."""


def unreachable_message(endpoint: Endpoint, error: Exception) -> str:
    return (
        f"No server answers at {endpoint.name}: {str(error) or type(error).__name__}. "
        "Start one with `atoll serve`, or set ATOLL_URL to another one."
    )


async def tls_error(endpoint: Endpoint, error: Exception, *, probe: bool) -> AtollError | None:
    """
    The error for a connection that failed because of TLS, or None if TLS is not the reason.

    With `probe`, try a TLS handshake with a server that closed the connection without a response.
    """
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        return TemporaryError(
            f"The certificate of {endpoint.name} is not trusted: {error}. "
            "Set SSL_CERT_FILE to the certificate of the authority that signed it.",
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
    """The error for a response that demands HTTPS, or None."""
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
        f"The server at {endpoint.name} {reason}. Use {url}",
        code="wrong_scheme",
        field="url",
    )


async def _speaks_tls(endpoint: Endpoint) -> bool:
    parts = urlsplit(endpoint.url or "")
    # Only the handshake is sent, so the certificate need not be verified.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_PROBE_TIMEOUT):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, ssl=context)
        writer.transport.abort()
        return True
    return False
