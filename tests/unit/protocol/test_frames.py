"""The frame codec against any bytes in any pieces."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol import frames, minijson

STREAMS = st.integers(0, 2**32 - 1)
KINDS = st.sampled_from(sorted(frames.KINDS))
FRAMES = st.lists(st.tuples(STREAMS, KINDS, st.binary(max_size=300)), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(alphabet=st.characters(codec="utf-8") | st.characters(categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)  # fmt: skip


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


@given(FRAMES, st.lists(st.integers(0, 4000), max_size=30))
def test_frames_are_decoded_however_the_bytes_are_split(
    sent: list[frames.Frame], cuts: list[int]
) -> None:
    decoder = frames.Decoder()
    data = b"".join(frames.encode(*frame) for frame in sent)
    received = [frame for piece in pieces(data, cuts) for frame in decoder.feed(piece)]
    assert received == sent


@given(FRAMES)
def test_frames_are_decoded_byte_by_byte(sent: list[frames.Frame]) -> None:
    decoder = frames.Decoder()
    data = b"".join(frames.encode(*frame) for frame in sent)
    assert [f for n in range(len(data)) for f in decoder.feed(data[n : n + 1])] == sent


@given(st.lists(st.binary(max_size=200), max_size=20))
def test_garbage_is_a_protocol_error_or_waits_for_more(garbage: list[bytes]) -> None:
    decoder = frames.Decoder()
    try:
        for piece in garbage:
            for stream, kind, payload in decoder.feed(piece):
                assert kind in frames.KINDS
                assert 0 <= stream < 2**32
                assert len(payload) <= frames.MAX_PAYLOAD
    except frames.ProtocolError:
        pass


@given(st.binary(max_size=200))
def test_a_payload_of_garbage_is_a_protocol_error(payload: bytes) -> None:
    for decode in (frames.decode_json, frames.decode_output, frames.decode_credit):
        with suppress(frames.ProtocolError):
            decode(payload)


@given(st.integers(frames.MAX_PAYLOAD + 1, 2**32 - 1), STREAMS, st.integers(0, 255))
def test_a_length_beyond_the_limit_is_refused_by_its_header(
    length: int, stream: int, kind: int
) -> None:
    with pytest.raises(frames.ProtocolError):
        frames.Decoder().feed(frames.HEADER.pack(length, stream, kind))


@given(st.sampled_from(sorted(set(range(256)) - frames.KINDS)))
def test_an_unknown_kind_is_refused_by_its_header(kind: int) -> None:
    with pytest.raises(frames.ProtocolError):
        frames.Decoder().feed(frames.HEADER.pack(0, 1, kind))


def test_the_decoder_keeps_at_most_one_incomplete_frame() -> None:
    decoder = frames.Decoder()
    whole = frames.encode(1, frames.DATA, bytes(65_536))
    tracemalloc.start()
    try:
        for _ in range(2000):
            assert len(decoder.feed(whole)) == 1
        decoder.feed(whole[:-1])
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1024 * 1024


def test_a_payload_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(frames.ProtocolError):
        frames.encode(1, frames.DATA, bytes(frames.MAX_PAYLOAD + 1))


@given(st.dictionaries(st.text(), JSON, max_size=6))
@settings(max_examples=60)
def test_objects_are_encoded_as_standard_json(value: dict[str, object]) -> None:
    ((_, _, payload),) = frames.Decoder().feed(frames.encode_json(1, frames.EVENT, value))
    assert frames.decode_json(payload) == value
    assert json.loads(payload) == value


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")))
@settings(max_examples=300)
def test_the_small_json_accepts_what_the_package_accepts(text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")
    try:
        expected = json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        with pytest.raises(ValueError):  # noqa: PT011 - any of its kinds
            minijson.loads(data)
    else:
        assert minijson.loads(data) == expected


@pytest.mark.parametrize("depth", [900, 2_000, 100_000])
def test_any_depth_is_refused_without_a_crash(depth: int) -> None:
    with pytest.raises(frames.ProtocolError):
        frames.decode_json(b'{"a":' + b"[" * depth + b"]" * depth)


def test_a_failed_encoding_leaves_no_state() -> None:
    inner: list[object] = [object()]
    value = {"a": inner}
    with pytest.raises(TypeError):
        minijson.dumps(value)
    inner[0] = 1
    assert minijson.dumps(value) == b'{"a":[1]}'


@pytest.mark.parametrize("payload", [b"[]", b"1", b"null", b'"x"', b"", b"NaN", b"{}x", b"\xff{}"])
def test_a_payload_that_is_not_an_object_is_refused(payload: bytes) -> None:
    with pytest.raises(frames.ProtocolError):
        frames.decode_json(payload)
