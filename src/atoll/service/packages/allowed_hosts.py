"""
Decides which hosts the files of a package index may be on.

A page of the index may link anywhere. Links to the index's own origin are allowed, and so are links
to hosts in the settings. Any other host must have public addresses alone, and the connection goes
to one of the addresses that were checked. Otherwise an index could make the control plane fetch
from this machine, its network or the metadata service of a cloud, and code of a build could read
the response.

If the environment of this process names a proxy, the proxy resolves names, and is responsible for
where they lead. Numeric addresses are checked in that case too.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from atoll.drivers.shared.package_proxy import (
    CONNECT_TIMEOUT,
    Destination,
    RequestRefused,
)
from atoll.drivers.shared.url_origin import origin
from atoll.service.http_target import PORTS, HttpTarget, UnknownHost
from atoll.service.public_addresses import is_public

if TYPE_CHECKING:
    from atoll.settings import PackageSettings

MAX_ADDRESSES = 4
"""Addresses of one name to which a download may connect."""


class AllowedHosts:
    def __init__(self, index_url: str, settings: PackageSettings) -> None:
        self._index = origin(index_url)
        self._private = {host.lower() for host in settings.private_hosts}
        self._timeout = CONNECT_TIMEOUT

    async def destinations(self, url: str) -> list[Destination]:
        """
        How to connect to a URL that a page or a redirect names. Raises `Refused`, or
        `httpx.ConnectError` if the host name does not resolve.
        """
        scheme, host, port = origin(url)
        if origin(url) == self._index or {host, f"{host}:{port}"} & self._private:
            return [Destination(url)]
        if _is_address(host) and not is_public(host):
            raise _refused()
        if scheme in getproxies() and not proxy_bypass(host):
            return [Destination(url)]
        target = HttpTarget(scheme, host, port or PORTS[scheme], _path(url))
        try:
            addresses = await target.addresses(timeout=self._timeout)
        except UnknownHost as error:
            raise httpx.ConnectError(f"Cannot resolve the host name {host}.") from error
        if not addresses or not all(map(is_public, addresses)):
            raise _refused()
        return [
            Destination(target.at(address), {"Host": target.authority}, {"sni_hostname": host})
            for address in addresses[:MAX_ADDRESSES]
        ]


def _path(url: str) -> str:
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _refused() -> RequestRefused:
    return RequestRefused(403, "The host has an address that is not public.")
