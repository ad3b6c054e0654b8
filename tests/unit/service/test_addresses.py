"""Where a webhook may be."""

from __future__ import annotations

import asyncio
import socket
import threading
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest

from atoll.errors import InvalidRequest
from atoll.service.http_target import HttpTarget
from atoll.service.public_addresses import SPECIAL_V4, SPECIAL_V6, is_public
from atoll.service.webhooks.url import parse, resolve

ADDRESSES = [
    ("8.8.8.8", True),
    ("2606:4700:4700::1111", True),
    ("::ffff:8.8.8.8", True),
    ("127.0.0.1", False),
    ("127.255.0.9", False),
    ("0.0.0.0", False),
    ("10.0.0.1", False),
    ("172.16.3.4", False),
    ("192.168.1.1", False),
    ("100.64.0.1", False),
    ("169.254.169.254", False),
    ("192.0.2.1", False),
    ("198.18.0.1", False),
    ("224.0.0.1", False),
    ("240.0.0.1", False),
    ("255.255.255.255", False),
    ("::", False),
    ("::1", False),
    ("::ffff:127.0.0.1", False),
    ("::ffff:169.254.169.254", False),
    ("64:ff9b::a9fe:a9fe", False),
    ("64:ff9b::808:808", True),
    ("2002:7f00:1::", False),
    ("2002:a9fe:a9fe::1", False),
    ("fe80::1", False),
    ("fe80::1%eth0", False),
    ("fc00::1", False),
    ("ff02::1", False),
    ("2001:db8::1", False),
    ("2001:0:808:808::1", False),  # Teredo
    ("2002:808:808::1", True),
    ("64:ff9b:1::808:808", False),
    ("100::1", False),
    ("3ffe:ffff::1", True),
    ("3fff::1", False),
    ("3fff:fff:ffff::1", False),
    ("3fff:1000::1", True),
    ("4000::1", False),
    ("5f00::1", False),
    ("fec0::1", False),
    ("::8.8.8.8", False),
    ("nonsense", False),
]


@pytest.mark.parametrize(("address", "public"), ADDRESSES, ids=[one for one, _ in ADDRESSES])
def test_only_addresses_of_the_public_internet_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


@pytest.mark.parametrize("network", [*SPECIAL_V4, *SPECIAL_V6], ids=str)
def test_no_address_of_a_special_network_is_public(network: IPv4Network | IPv6Network) -> None:
    middle = network[network.num_addresses // 2]
    for address in (network[0], middle, network[-1]):
        if str(network) != "2002::/16":
            assert not is_public(str(address))
        if isinstance(address, IPv4Address):
            number = int(address)
            assert not is_public(str(IPv6Address((0xFFFF << 32) + number)))
            assert not is_public(str(IPv6Address((0x64FF9B << 96) + number)))
            assert not is_public(str(IPv6Address((0x2002 << 112) + (number << 80))))


def test_an_address_is_parsed_and_formatted() -> None:
    target = parse("https://Example.com:8443/a/b?c=d&e")

    assert target == HttpTarget("https", "example.com", 8443, "/a/b?c=d&e")
    assert target.authority == "example.com:8443"
    assert target.at("192.0.2.7") == "https://192.0.2.7:8443/a/b?c=d&e"
    assert parse("http://example.com").at("2001:db8::1") == "http://[2001:db8::1]:80/"
    assert parse("http://[2001:db8::1]/").authority == "[2001:db8::1]"


@pytest.mark.parametrize(
    "url",
    ["", "example.com", "//example.com", "file:///etc/passwd", "http://", "http:///x", "http://a:0/",
     "http://a:b/", "http://a:65536/", "http://u@a/", "http://a/#f", "http://a b/", "http://a\\@b/",
     "http://ä/", "http://[::1", "http://[fe80::1%25eth0]/", "http://a/\n",
     "http://a/" + "x" * 3000],
)  # fmt: skip
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(url)
    assert refused.value.code == "webhook_bad_url"


@pytest.mark.anyio
async def test_every_address_of_a_name_is_checked() -> None:
    local = parse("http://localhost/")

    assert await resolve(local, private=True, timeout=60)
    with pytest.raises(InvalidRequest) as refused:
        await resolve(local, private=False, timeout=60)
    assert refused.value.code == "webhook_private_address"
    with pytest.raises(InvalidRequest) as unknown:
        await resolve(parse("http://nobody.invalid/"), private=True, timeout=5)
    assert unknown.value.code == "webhook_unknown_host"


@pytest.mark.anyio
async def test_slow_name_resolution_delays_no_other_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()

    def asked(*_: object) -> list[object]:
        over.wait()
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    target = parse("http://slow.example")
    try:
        lookups = [resolve(target, private=False, timeout=0.01) for _ in range(64)]
        answers = await asyncio.gather(*lookups, return_exceptions=True)
        assert {type(answer) for answer in answers} == {InvalidRequest}
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(int, "1") == 1
    finally:
        over.set()
