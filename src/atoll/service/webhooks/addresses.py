"""
Which addresses a webhook may be at.

A name leads wherever its owner likes, and somewhere else a moment later. So it is looked up here,
all that it leads to is judged, and the connection goes to an address that was judged and not to
the name. Unless told otherwise only addresses of the public internet pass: none of this machine,
its network, or the services that clouds have at fixed addresses.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from atoll.errors import InvalidRequest
from atoll.model.webhook import LONGEST_URL
from atoll.service.public_addresses import is_public

MOST_ADDRESSES = 4
"""Tried of one name."""
_LOOKUPS = ThreadPoolExecutor(4, thread_name_prefix="lookup")
"""
Of their own: the servers of a name's owner may answer as late as they like, and a thread that waits
for them cannot be called back.
"""
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Target:
    """An address on the web, taken apart."""

    scheme: str
    host: str
    port: int
    path: str
    """With the query."""

    @property
    def authority(self) -> str:
        """As the header `Host` has it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    def at(self, address: str) -> str:
        """The same with an address in place of the name."""
        host = f"[{address}]" if ":" in address else address
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def parse(url: str) -> Target:
    if len(url) > LONGEST_URL:
        raise _bad(f"longer than {LONGEST_URL} characters.")
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise _bad("not an address: write other characters as a URL has them.")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _bad("not an address.") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise _bad("it begins with http:// or https:// and has a host.")
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise _bad("no user, password or fragment.")
    if len(parts.hostname) > 253 or "%" in parts.hostname or port == 0:
        raise _bad("the host is none.")
    path = parts.path or "/"
    if parts.query:
        path += f"?{parts.query}"
    return Target(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], path)


async def resolve(target: Target, *, private: bool, timeout: float) -> list[str]:
    """Where it is, if all of that is allowed."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            found = await loop.run_in_executor(
                _LOOKUPS,
                socket.getaddrinfo,
                target.host,
                target.port,
                socket.AF_UNSPEC,
                socket.SOCK_STREAM,
                socket.IPPROTO_TCP,
            )
    except (OSError, UnicodeError, TimeoutError):
        raise InvalidRequest(
            f"url: nobody knows where {target.host} is.", code="webhook_unknown_host", field="url"
        ) from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    for address in addresses:
        if not private and not is_public(address):
            raise InvalidRequest(
                f"url: {target.host} is at an address that is not public. Webhooks go there only "
                "with the setting event.webhook_private.",
                code="webhook_private_address",
                field="url",
            )
    return addresses[:MOST_ADDRESSES]


def _bad(why: str) -> InvalidRequest:
    return InvalidRequest(f"url: {why}", code="webhook_bad_url", field="url")
