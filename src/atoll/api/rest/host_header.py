"""
Whether the `Host` of a request is a name of this server.

Links with a token in them begin with it, and a client writes into it whatever it likes. Without a
setting it is trusted when it is the address that the connection came to, loopback, or the name of
this machine, with the port that is listened on. Where another node passed the request on, that node
has checked it.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import Scope

UNKNOWN = b"unknown.invalid"
"""The `Host` of a request that is passed on to another node when the client's was not trusted."""
FORWARDED = "atoll.forwarded"
"""Set in the scope of a request that another node passed on."""
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


def is_own(scope: Scope, trusted: Collection[str]) -> bool:
    found = [value for name, value in scope["headers"] if name == b"host"]
    server = scope.get("server")
    if not found:
        return True  # The framework then takes the address that the connection came to.
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
