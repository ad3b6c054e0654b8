"""Addresses of a Redis: refused ones, and hidden passwords."""

from __future__ import annotations

import pytest

from atoll.coordination.redis.commands import check_address
from atoll.errors import InvalidRequest

SECRET = "s3cret"


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        "redis://localhost:6379/0",
        "redis://:a%2Fb%40c@10.0.0.1:6380/3",
        "rediss://user:word@[::1]:6380?ssl_ca_certs=/ca.pem",
        "unix:///run/redis.sock?db=2",
    ],
)
def test_a_valid_address_is_accepted(url: str) -> None:
    check_address(url)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://:{0}@host", "redis://"),
        ("{0}", "redis://"),
        ("redis://:p@ss/{0}@host:6379/0", "%2F"),
        ("redis://:{0}@host:6379/abc", "number of a database"),
        ("redis://:{0}@host:port", "port"),
        ("redis://:x#{0}@host", "port"),
        ("redis://:{0}@host/0?foo=bar", "foo"),
        ("redis://:{0}@host/0?socket_timeout=abc", "socket_timeout"),
    ],
)
def test_an_error_names_the_mistake_and_hides_the_password(url: str, named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_address(url.format(SECRET))

    assert caught.value.code == "bad_redis_url"
    assert named in caught.value.message
    assert SECRET not in caught.value.message
