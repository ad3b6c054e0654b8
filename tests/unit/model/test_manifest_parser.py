"""Manifests and pages that an attacker wrote to the blob store."""

from __future__ import annotations

import contextlib
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import PermanentError
from atoll.model.manifest import MAX_OBJECT, MAX_PAGE, PAGE_ENTRIES, Entry, Manifest
from atoll.model.manifest_parser import TreeOrder, read_manifest, read_page

DIGEST = "ab" * 32
FILE: list[Any] = ["a", "f", 0o644, 10, 1, 1, 1, "", [[DIGEST, 0, 10]]]
MANIFEST = json.loads(
    Manifest("s", 1, "now", 1, 10, (("a", DIGEST),), {DIGEST: (10, 10)}).encoded()
)


def page(*entries: Any) -> bytes:
    return zlib.compress(b"\n".join(json.dumps(entry).encode() for entry in entries))


def changed(place: int, value: Any) -> list[Any]:
    return [value if at == place else item for at, item in enumerate(FILE)]


HOSTILE_ENTRIES = {
    "leads up": changed(0, "../a"),
    "leads up within": changed(0, "a/../../b"),
    "absolute": changed(0, "/etc/passwd"),
    "no name": changed(0, ""),
    "empty part": changed(0, "a//b"),
    "NUL": changed(0, "a\0b"),
    "name of 256 bytes": changed(0, "é" * 128),
    "path of 20,000": changed(0, "a/" * 10_000 + "a"),
    "300 levels": changed(0, "/".join("d" * 300)),
    "path is no text": changed(0, ["a"]),
    "half a character": changed(0, "\ud800"),
    "device": changed(1, "c"),
    "kind is a number": changed(1, 1),
    "mode has more": changed(2, 0o170000),
    "mode is true": changed(2, True),
    "negative size": changed(3, -1),
    "size of 2**63": changed(3, 2**63),
    "size is a fraction": changed(3, 1.5),
    "size is not a number": changed(3, float("nan")),
    "time without end": changed(4, 10**29),
    "time before all": changed(4, -(10**29)),
    "inode of 65 bits": changed(6, 2**64),
    "target is no text": changed(7, None),
    "parts are no list": changed(8, {}),
    "part of two": changed(8, [[DIGEST, 0]]),
    "part is no list": changed(8, [7]),
    "object is a path": changed(8, [["../../sess_2/data/" + DIGEST, 0, 10]]),
    "object is a number": changed(8, [[1, 0, 10]]),
    "part of nothing": changed(8, [[DIGEST, 0, 0]]),
    "part before its object": changed(8, [[DIGEST, -1, 10]]),
    "part behind its object": changed(8, [[DIGEST, MAX_OBJECT, 1]]),
    "part of gigabytes": changed(8, [[DIGEST, 0, 2**32]]),
    "negative hole": changed(8, [[None, 0, -1]]),
    "hole without end": changed(8, [[None, 0, 2**70]]),
    "more than its size": changed(8, [[None, 0, 11]]),
    "40,001 parts": ["a", "f", 0, 2**40, 1, 1, 1, "", [[None, 0, 1]] * 40_001],
    "directory with parts": ["a", "d", 0o755, 10, 1, 1, 1, "", [[DIGEST, 0, 1]]],
    "too few fields": FILE[:8],
    "too many fields": [*FILE, []],
    "an object": {"path": "a"},
    "nothing": None,
}


@pytest.mark.parametrize("entry", HOSTILE_ENTRIES.values(), ids=HOSTILE_ENTRIES)
def test_an_invalid_entry_counts_as_damage(entry: Any) -> None:
    assert read_page(page(FILE))
    with pytest.raises(PermanentError) as refused:
        read_page(page(FILE, entry))
    assert refused.value.code == "checkpoint_damaged"


def test_an_inflated_page_is_limited_to_the_size_of_a_page() -> None:
    bomb = zlib.compress(bytes(64 * MAX_PAGE), 9)
    assert len(bomb) < MAX_PAGE
    for data in (bomb, bomb[:-8], page(FILE)[:-1], b"", b"no zlib", page(*[FILE] * 5000)):
        with pytest.raises(PermanentError) as refused:
            read_page(data)
        assert refused.value.code == "checkpoint_damaged"
    assert len(read_page(page(*[FILE] * PAGE_ENTRIES))) == PAGE_ENTRIES


HOSTILE_MANIFESTS = {
    "another session's": {"session_id": "t"},
    "number of text": {"number": "1"},
    "negative": {"size": -1},
    "pages of paths": {"pages": [["a", "../../manifests/x"]]},
    "pages of one": {"pages": [["a"]]},
    "pages are a number": {"pages": 7},
    "first path is a number": {"pages": [[1, DIGEST]]},
    "objects of paths": {"objects": {"../x": [1, 1]}},
    "objects of gigabytes": {"objects": {DIGEST: [1, 2**40]}},
    "objects are a list": {"objects": [DIGEST]},
    "flags of text": {"settled": "no"},
    "unknown fields": {"__class__": 1},
}


@pytest.mark.parametrize("fields", HOSTILE_MANIFESTS.values(), ids=HOSTILE_MANIFESTS)
def test_an_invalid_manifest_counts_as_damage(fields: dict[str, Any]) -> None:
    assert read_manifest(json.dumps(MANIFEST).encode(), "s").objects == {DIGEST: (10, 10)}
    with pytest.raises(PermanentError) as refused:
        read_manifest(json.dumps(MANIFEST | fields).encode(), "s")
    assert refused.value.code == "checkpoint_damaged"


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"\xff", b"{" * 100_000, b"[" * 100_000, b'{"version":1}'],
)
def test_data_that_is_not_a_manifest_counts_as_damage(data: bytes) -> None:
    with pytest.raises(PermanentError) as refused:
        read_manifest(data, "s")
    assert refused.value.code == "checkpoint_damaged"


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=10,
)


@given(st.lists(_json, min_size=9, max_size=9), st.integers(0, 8), st.binary(max_size=50))
def test_arbitrary_data_is_read_or_counts_as_damage(
    fields: list[Any], place: int, noise: bytes
) -> None:
    for data in (page(fields), page(changed(place, fields[0])), zlib.compress(noise), noise):
        # Anything else that it raises fails the test.
        with contextlib.suppress(PermanentError):
            assert all(isinstance(entry, Entry) for entry in read_page(data))


@pytest.mark.parametrize(
    "paths",
    [
        ["a:f", "a:f"],
        ["b:f", "a:f"],
        ["a:f", "a/b:f"],
        ["a:l", "a/b:f"],
        ["a/b:f"],
        ["a:d", "a/b:d", "b:f", "b/c:f"],
        ["a:d", "a/b:d", "a/c/d:f"],
    ],
    ids="-".join,
)
def test_entries_that_do_not_form_a_tree_count_as_damage(paths: list[str]) -> None:
    def entries(texts: list[str]) -> list[Entry]:
        return read_page(page(*([t[:-2], t[-1], 0, 0, 0, 0, 0, "", []] for t in texts)))

    good = TreeOrder()
    for entry in entries(["a:d", "a/b:d", "a/b/c:f", "a/d:f", "b:l", "c:d", "d:f"]):
        good.check(entry)
    order = TreeOrder()
    *before, last = entries(paths)
    for entry in before:
        order.check(entry)
    with pytest.raises(PermanentError) as refused:
        order.check(last)
    assert refused.value.code == "checkpoint_damaged"
