"""
Checks whether the `Host` header of a request names this server.

Links that contain a token start with it, and clients choose its value. By default it is trusted if
it is the address of the connection, a loopback address, or this machine's name, with the port that
the server listens on; a setting adds names. If another node forwarded the request, that node has
checked it.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from atoll.api.rest.headers import headers_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import Scope

UNKNOWN = b"unknown.invalid"
"""The `Host` of a request that is forwarded to another node if the client's is not trusted."""
FORWARDED = "atoll.forwarded"
"""Key in the scope of a request that another node forwarded."""
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


def is_trusted(scope: Scope, trusted: Collection[str]) -> bool:
    found = headers_of(scope, b"host")
    server = scope.get("server")
    if not found:
        return True  # The framework then uses the address of the connection.
    if len(found) > 1 or found[0] == UNKNOWN:
        return False
    if scope.get(FORWARDED):
        return True
    text = found[0].decode("latin-1").lower()
    try:
        parts = urlsplit(f"//{text}")
        name, port = parts.hostname or "", parts.port
    except ValueError:
        return False
    if parts.netloc != text or parts.username is not None:
        return False
    if text in trusted or name in trusted:
        return True
    if server is None:
        return False
    if server[1] is not None and (port or _PORTS[scope["scheme"]]) != server[1]:
        return False
    return name == server[0].lower() or _is_loopback(name) or name == socket.gethostname().lower()


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
