"""Headers of conditional requests and ranges, and paths on the wire."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from atoll.api.rest import conditional_requests, path_encoding
from atoll.errors import InvalidRequest
from atoll.service.files.types import ByteRange, FileInfo

ENTRY = FileInfo("a", "file", 10, 0o644, datetime(2026, 1, 2, 3, 4, 5, 678, UTC), "tag")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (None, None), ("*", ["*"]), ('"a"', ["a"]), ('"a", "b"', ["a", "b"]),
        ('W/"a","b"', ["W/a", "b"]), ('"a,b"', ["a,b"]), ("", []), (' "a" ', ["a"]),
    ],
)  # fmt: skip
def test_etags_are_parsed(value: str | None, found: list[str] | None) -> None:
    assert conditional_requests.parse_tags(value) == found


@pytest.mark.parametrize("value", ["a", '"a', '"a" "b"', "**", 'w/"a"'])
def test_an_invalid_list_of_etags_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest):
        conditional_requests.parse_tags(value)


@given(st.text(st.characters(max_codepoint=255), max_size=30))
def test_no_header_breaks_the_parser(value: str) -> None:
    for name in ("range", "if-range", "if-modified-since", "if-unmodified-since"):
        headers = Headers({name: value, "range": value})
        conditional_requests.requested_range(headers, ENTRY)
        conditional_requests.evaluate(headers, ENTRY)
    for name in ("if-match", "if-none-match"):
        with contextlib.suppress(InvalidRequest):
            conditional_requests.evaluate(Headers({name: value}), ENTRY)


@pytest.mark.parametrize(
    ("version", "part"),
    [
        ('"tag"', ByteRange(1, 2, "tag")), ('"x"', ByteRange(1, 2, "x")),
        ('W/"tag"', ByteRange(1, 2, 'W/"tag')),
        ("Fri, 02 Jan 2026 03:04:05 GMT", ByteRange(1, 2, "tag")),
        ("Fri, 02 Jan 2026 03:04:06 GMT", None), ("nonsense", None),
    ],
)  # fmt: skip
def test_a_range_can_depend_on_the_version(version: str, part: ByteRange | None) -> None:
    headers = Headers({"range": "bytes=1-2", "if-range": version})
    assert conditional_requests.requested_range(headers, ENTRY) == part


@given(st.binary(max_size=40))
def test_every_path_survives_percent_encoding(raw: bytes) -> None:
    path = path_encoding.from_bytes(raw)
    assert path_encoding.percent_decoded(path_encoding.percent_encoded(path)) == path
    assert path_encoding.percent_encoded(path).isascii()
    path_encoding.readable(path).encode()
