"""The streaming form parser finds the same parts however the body is split into pieces."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.api.rest.multipart import MAX_FIELD, parts
from atoll.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TYPE = "multipart/form-data; boundary=xYz"
Read = list[tuple[str, str | None, bytes]]


def body_of(*fields: tuple[str, str | None, bytes]) -> bytes:
    body = b""
    for name, filename, content in fields:
        head = f'Content-Disposition: form-data; name="{name}"'
        if filename is not None:
            head += f'; filename="{filename}"\r\nContent-Type: application/octet-stream'
        body += b"--xYz\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"
    return body + b"--xYz--\r\n"


async def _stream(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


def read(pieces: list[bytes], content_type: str = TYPE, skip: frozenset[int] = frozenset()) -> Read:
    async def work() -> Read:
        found: Read = []
        number = 0
        async for part in parts(content_type, _stream(pieces)):
            content = b""
            if number not in skip:
                content = b"".join([piece async for piece in part.content()])
            found.append((part.name, part.filename, content))
            number += 1
        return found

    return asyncio.run(work())


def read_or_refuse(pieces: list[bytes]) -> Read | str:
    """The parts, or the code of the refusal."""
    try:
        return read(pieces)
    except InvalidRequest as error:
        return error.code


def cut(body: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(body) + 1) for place in places), len(body)]
    return [body[start:end] for start, end in itertools.pairwise(edges)]


NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters='"\\\r\n;', exclude_categories=["C"])
)
# What looks like the boundary, or a part of it, is the hard case.
CONTENT = st.lists(
    st.sampled_from([b"\r\n", b"--xYz", b"\r\n--xY", b"--", b"-", b"\r", b"\n", b"a"])
    | st.binary(max_size=20)
).map(b"".join).filter(lambda content: b"\r\n--xYz" not in b"\r\n" + content)  # fmt: skip


@given(
    fields=st.lists(st.tuples(NAMES, st.none() | NAMES, CONTENT), max_size=4),
    places=st.lists(st.integers(min_value=0), max_size=10),
)
def test_parts_do_not_depend_on_how_the_body_is_split(fields: Read, places: list[int]) -> None:
    assert read(cut(body_of(*fields), places)) == fields


def test_a_body_that_arrives_byte_by_byte_is_parsed() -> None:
    fields: Read = [("path", None, b"dir"), ("file", "a.txt", b"\r\n--xY\r\ncontent\r\n")]
    body = body_of(*fields)

    assert read([body[n : n + 1] for n in range(len(body))]) == fields


@pytest.mark.parametrize("size", [1, 7, 1000], ids=str)
def test_a_part_that_is_not_read_is_skipped(size: int) -> None:
    fields: Read = [("a", "a", b"x" * 50), ("b", "b", b"y" * 50), ("c", "c", b"z" * 50)]
    body = body_of(*fields)
    pieces = [body[n : n + size] for n in range(0, len(body), size)]

    assert read(pieces, skip=frozenset({0, 1})) == [("a", "a", b""), ("b", "b", b""), fields[2]]


@given(body=st.binary(max_size=200), places=st.lists(st.integers(min_value=0), max_size=4))
def test_any_bytes_are_parsed_or_refused(body: bytes, places: list[int]) -> None:
    found = read_or_refuse(cut(b"--xYz\r\n" + body, places))

    assert isinstance(found, list) or found == "bad_multipart"


@given(end=st.integers(min_value=1))
def test_a_truncated_file_is_never_complete(end: int) -> None:
    content = b"x" * 100
    body = body_of(("file", "a", content))
    whole = body.index(b"\r\n--xYz--") + len(b"\r\n--xYz")

    assert read_or_refuse([body[: end % whole]]) in ([], "bad_multipart")


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data", b"--xYz--\r\n"),
        ("multipart/form-data; boundary=", b"--xYz--\r\n"),
        (TYPE, b"--other\r\n\r\n"),
        (TYPE, b"--xYz\r\n" + b"A" * 20_000 + b": b\r\n\r\nx\r\n--xYz--\r\n"),
        (TYPE, b"--xYz\r\nA: " + b"b" * 20_000 + b"\r\n\r\nx\r\n--xYz--\r\n"),
        (TYPE, b"--xYz\r\n" + b"".join(b"A%d: b\r\n" % n for n in range(20)) + b"\r\nx\r\n--xYz--"),
    ],
    ids=["no boundary", "empty boundary", "another", "long name", "long value", "many headers"],
)
def test_an_invalid_body_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read([body], content_type)
    assert caught.value.code == "bad_multipart"


def test_a_field_is_text_up_to_its_limit() -> None:
    async def text(content: bytes) -> str:
        async for part in parts(TYPE, _stream([body_of(("path", None, content))])):
            return await part.text()
        raise AssertionError

    assert asyncio.run(text("dör".encode())) == "dör"
    with pytest.raises(InvalidRequest):
        asyncio.run(text(b"x" * (MAX_FIELD + 1)))
