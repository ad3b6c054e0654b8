"""
Tells addresses of the public internet from all others.

The networks are those of IANA's registries of special-purpose addresses (RFC 6890) and of IPv6
unicast space. They are written out because what Python's `is_global` knows depends on its version.
An address that is not known to be public is not public: of IPv6 only 2000::/3 can be.
"""

from __future__ import annotations

import ipaddress
from ipaddress import IPv4Address, IPv6Address, IPv6Network

SPECIAL_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            "0.0.0.0/8",  # this network
            "10.0.0.0/8",  # private
            "100.64.0.0/10",  # shared address space
            "127.0.0.0/8",  # loopback
            "169.254.0.0/16",  # link-local, and where clouds have their metadata
            "172.16.0.0/12",  # private
            "192.0.0.0/24",  # IETF protocol assignments
            "192.0.2.0/24",  # documentation
            "192.31.196.0/24",  # AS112
            "192.52.193.0/24",  # AMT
            "192.88.99.0/24",  # 6to4 relays
            "192.168.0.0/16",  # private
            "192.175.48.0/24",  # AS112
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, with the broadcast address
        ),
    )
)
UNICAST_V6 = IPv6Network("2000::/3")
SPECIAL_V6 = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # IETF protocol assignments: Teredo, benchmarks, ORCHID and others
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4: the embedded IPv4 address decides
            "2620:4f:8000::/48",  # AS112
            "3fff::/20",  # documentation
        ),
    )
)
_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_6TO4 = IPv6Network("2002::/16")


def is_public(text: str) -> bool:
    """Also unwraps IPv4 addresses that are embedded in IPv6 addresses."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address):
        embedded = _embedded_v4(address)
        if embedded is None:
            return address in UNICAST_V6 and not any(address in net for net in SPECIAL_V6)
        address = embedded
    return not any(address in net for net in SPECIAL_V4)


def _embedded_v4(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that is embedded in an IPv6 address, if any."""
    number = int(address)
    if address in _MAPPED or address in _NAT64:
        return IPv4Address(number & 0xFFFFFFFF)
    if address in _6TO4:
        return IPv4Address((number >> 80) & 0xFFFFFFFF)
    return None
