"""
Checks the URL of a webhook, before it is stored and before each delivery.

Only public addresses pass unless the setting `event.webhook_private` allows others: a webhook must
not reach this machine, its network, or the metadata service of a cloud.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from atoll.errors import InvalidRequest
from atoll.model.webhook import MAX_URL_LENGTH
from atoll.service.http_target import PORTS, HttpTarget, UnknownHost
from atoll.service.public_addresses import is_public

MAX_ADDRESSES = 4
"""Addresses of one name to which a delivery may connect."""


def parse(url: str) -> HttpTarget:
    if len(url) > MAX_URL_LENGTH:
        raise _bad(f"at most {MAX_URL_LENGTH} characters.")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise _bad("not a valid URL: percent-encode spaces and characters outside ASCII.")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _bad("not a valid URL.") from None
    if parts.scheme not in PORTS or not parts.hostname:
        raise _bad("must begin with http:// or https:// and name a host.")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise _bad("must not contain a user, a password or a fragment.")
    if len(parts.hostname) > 253 or "%" in parts.hostname or port == 0:
        raise _bad("invalid host or port.")
    path = parts.path or "/"
    if parts.query:
        path += f"?{parts.query}"
    return HttpTarget(parts.scheme, parts.hostname, port or PORTS[parts.scheme], path)


async def resolve(target: HttpTarget, *, private: bool, timeout: float) -> list[str]:
    """The addresses to connect to; `InvalidRequest` unless every address of the host is allowed."""
    try:
        addresses = await target.addresses(timeout=timeout)
    except UnknownHost:
        raise InvalidRequest(
            f"url: cannot resolve the host name {target.host}.",
            code="webhook_unknown_host",
            field="url",
        ) from None
    if not private and not all(map(is_public, addresses)):
        raise InvalidRequest(
            f"url: {target.host} has an address that is not public. Set event.webhook_private to "
            "allow webhooks to private addresses.",
            code="webhook_private_address",
            field="url",
        )
    return addresses[:MAX_ADDRESSES]


def _bad(why: str) -> InvalidRequest:
    return InvalidRequest(f"url: {why}", code="webhook_bad_url", field="url")
