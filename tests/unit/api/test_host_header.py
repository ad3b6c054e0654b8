"""Which hosts links may start with."""

from __future__ import annotations

import socket

import pytest

from atoll.api.rest import host_header

HERE = socket.gethostname().lower()
CASES = [
    ("127.0.0.1:8000", ("127.0.0.1", 8000), True),
    ("localhost:8000", ("127.0.0.1", 8000), True),
    ("LOCALHOST:8000", ("127.0.0.1", 8000), True),
    ("[::1]:8000", ("::1", 8000), True),
    ("10.1.2.3:8000", ("10.1.2.3", 8000), True),
    (f"{HERE}:8000", ("10.1.2.3", 8000), True),
    ("localhost", ("127.0.0.1", 80), True),
    ("embedded", ("embedded", None), True),
    ("trusted.example", ("10.1.2.3", 8000), True),
    ("trusted.example:99", ("10.1.2.3", 8000), True),
    ("other.example:443", ("10.1.2.3", 8000), True),
    ("other.example:444", ("10.1.2.3", 8000), False),
    ("evil.example:8000", ("127.0.0.1", 8000), False),
    ("127.0.0.1:8001", ("127.0.0.1", 8000), False),
    ("127.0.0.1:8000@evil.example", ("127.0.0.1", 8000), False),
    ("evil.example/127.0.0.1:8000", ("127.0.0.1", 8000), False),
    ("127.0.0.1.evil.example:8000", ("127.0.0.1", 8000), False),
    ("127.0.0.1:80000", ("127.0.0.1", 8000), False),
    ("[::1", ("::1", 8000), False),
    ("", ("127.0.0.1", 8000), False),
    ("unknown.invalid", ("127.0.0.1", 8000), False),
]


@pytest.mark.parametrize(("host", "server", "own"), CASES, ids=[case[0] for case in CASES])
def test_only_names_of_the_server_are_trusted(
    host: str, server: tuple[str, int | None], own: bool
) -> None:
    headers = [(b"host", host.encode())]
    scope = {"type": "http", "scheme": "http", "headers": headers, "server": server}
    assert host_header.is_trusted(scope, ("trusted.example", "other.example:443")) is own
    twice = {**scope, "headers": [*headers, (b"host", b"evil.example")]}
    assert not host_header.is_trusted(twice, ())


@pytest.mark.parametrize(("host", "own"), [(b"any.example", True), (host_header.UNKNOWN, False)])
def test_the_host_of_a_forwarded_request_was_checked_before(host: bytes, own: bool) -> None:
    scope = {"type": "http", "scheme": "http", "headers": [(b"host", host)], "server": ("a", 1)}
    assert host_header.is_trusted({**scope, host_header.FORWARDED: True}, ()) is own
