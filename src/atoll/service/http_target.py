"""
Connects to an address that was checked, not to a name.

The owner of a name decides where it leads, and can change that between a check and the connection
(DNS rebinding). So the service resolves the name itself, checks every address that it leads to, and
connects to one of these addresses.
"""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

PORTS = {"http": 80, "https": 443}
_LOOKUPS = ThreadPoolExecutor(4, thread_name_prefix="lookup")
"""
A pool of its own: the name servers of a stranger may delay their answers, and a thread that waits
for one cannot be cancelled.
"""


class UnknownHost(Exception):
    """A name that does not resolve in time."""


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """The parts of an HTTP URL."""

    scheme: str
    host: str
    port: int
    path: str
    """Includes the query."""

    @property
    def authority(self) -> str:
        """Value of the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    def at(self, address: str) -> str:
        """The URL with an address in place of the host name."""
        host = f"[{address}]" if ":" in address else address
        return f"{self.scheme}://{host}:{self.port}{self.path}"

    async def addresses(self, *, timeout: float) -> list[str]:
        """All addresses of the host; raises `UnknownHost`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                found = await loop.run_in_executor(
                    _LOOKUPS,
                    socket.getaddrinfo,
                    self.host,
                    self.port,
                    socket.AF_UNSPEC,
                    socket.SOCK_STREAM,
                    socket.IPPROTO_TCP,
                )
        except (OSError, UnicodeError, TimeoutError):
            raise UnknownHost(self.host) from None
        return list(dict.fromkeys(str(entry[4][0]) for entry in found))
