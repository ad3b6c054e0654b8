"""
Which hosts the files of a package index may be at.

A page of the index may link anywhere. Links to the index's own origin are followed as they are, and
so are those to hosts that settings name. Any other name is looked up here, all that it leads to has
to be an address of the public internet, and the connection goes to an address that was judged and
not to the name: else an index could have the control plane fetch from this machine, its network or
the services that clouds have at fixed addresses, for code of a build to read.

Where a proxy of this process's environment is used, it is the proxy that looks names up, and the
proxy's affair where they lead; addresses that are written as numbers are judged all the same.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from atoll.drivers.relay import CONNECT_TIMEOUT, Refused, Way, origin
from atoll.errors import InvalidRequest
from atoll.service.public_addresses import is_public
from atoll.service.webhooks.addresses import Target, resolve

if TYPE_CHECKING:
    from atoll.settings import PackageSettings

PORTS = {"http": 80, "https": 443}


class PackageHosts:
    def __init__(self, index_url: str, settings: PackageSettings) -> None:
        self._index = origin(index_url)
        self._private = {host.lower() for host in settings.private_hosts}
        self._timeout = CONNECT_TIMEOUT

    async def ways(self, url: str) -> list[Way]:
        """
        How to connect to an address that a page or a redirect names. Raises `Refused`, and
        `httpx.ConnectError` when the name is not known.
        """
        scheme, host, port = origin(url)
        if origin(url) == self._index or {host, f"{host}:{port}"} & self._private:
            return [Way(url)]
        if _is_address(host) and not is_public(host):
            raise _refused()
        if scheme in getproxies() and not proxy_bypass(host):
            return [Way(url)]
        target = Target(scheme, host, port or PORTS[scheme], _path(url))
        try:
            found = await resolve(target, private=True, timeout=self._timeout)
        except InvalidRequest as error:
            raise httpx.ConnectError(error.message) from error
        if not found or not all(is_public(address) for address in found):
            raise _refused()
        return [
            Way(target.at(address), {"Host": target.authority}, {"sni_hostname": host})
            for address in found
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


def _refused() -> Refused:
    return Refused(403, "It is at an address that is not public.")
