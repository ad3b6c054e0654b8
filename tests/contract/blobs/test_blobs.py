"""Objects by key: read and written completely or not at all, also concurrently."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from atoll.blobs.base import OversizedBlob
from tests.contract.blobs.conftest import chunked

if TYPE_CHECKING:
    from atoll.blobs.base import Blobs

pytestmark = pytest.mark.anyio

BAD_KEYS = {
    "empty": "",
    "only a slash": "/",
    "leading slash": "/a",
    "trailing slash": "a/",
    "empty name": "a//b",
    "parent": "..",
    "parent first": "../a",
    "parent within": "a/../b",
    "parent last": "a/..",
    "this": "a/./b",
    "backslash": "a\\b",
    "NUL": "a\0b",
    "newline": "a\n",
    "blank": "a b",
    "percent": "a%2fb",
    "a put's own mark": "a#1",
    "beyond ASCII": "ä",
    "too long": "a" * 513,
}
RANGES = {
    "all": (0, None, b"0123456789"),
    "from": (3, None, b"3456789"),
    "to": (0, 3, b"012"),
    "within": (2, 5, b"234"),
    "the last": (9, 10, b"9"),
    "over the end": (8, 100, b"89"),
    "empty": (5, 5, b""),
    "backwards": (5, 2, b""),
    "at the end": (10, None, b""),
    "behind the end": (11, 20, b""),
}


@pytest.mark.quick
@pytest.mark.parametrize("size", [0, 1, 4096, 3 * 2**20])
async def test_a_stored_object_is_returned_unchanged(blobs: Blobs, size: int) -> None:
    data = (bytes(range(256)) * (size // 256 + 1))[:size]

    await blobs.put("a/b/c", data)

    got = await blobs.get("a/b/c")
    assert type(got) is bytes
    assert got == data


@pytest.mark.quick
async def test_an_object_larger_than_the_limit_is_not_read(blobs: Blobs) -> None:
    await blobs.put("a", b"0123456789")

    assert await blobs.get("a", limit=10) == b"0123456789"
    assert await blobs.get("a", start=2, end=5, limit=3) == b"234"
    for start, end in ((0, None), (0, 100), (3, None)):
        with pytest.raises(OversizedBlob) as refused:
            await blobs.get("a", start=start, end=end, limit=5)
        assert refused.value.code == "blob_damaged"


async def test_get_of_a_missing_object_returns_null(blobs: Blobs) -> None:
    assert await blobs.get("nothing/here") is None
    assert await blobs.get("nothing/here", start=1, end=2) is None
    await blobs.put("dir/a", b"1")
    assert await blobs.get("dir") is None


async def test_a_put_replaces(blobs: Blobs) -> None:
    await blobs.put("a", b"long" * 1000)
    await blobs.put("a", b"short")

    assert await blobs.get("a") == b"short"


@pytest.mark.parametrize(("start", "end", "part"), RANGES.values(), ids=RANGES.keys())
async def test_a_range_is_clipped(blobs: Blobs, start: int, end: int | None, part: bytes) -> None:
    await blobs.put("a", b"0123456789")

    assert await blobs.get("a", start=start, end=end) == part


async def test_removing_an_object_twice_is_harmless(blobs: Blobs) -> None:
    await blobs.put("a/b", b"1")
    await blobs.put("a/c", b"2")

    await blobs.remove("a/b")
    await blobs.remove("a/b")

    assert await blobs.get("a/b") is None
    assert await blobs.get("a/c") == b"2"


async def test_remove_all_removes_exactly_the_prefix(blobs: Blobs) -> None:
    gone = ["x/1/a", "x/1/b", "x/1/deep/c"]
    stay = ["x/10/a", "x/2", "y/1/a"]
    for key in gone + stay:
        await blobs.put(key, key.encode())

    await blobs.remove_all("x/1/")
    await blobs.remove_all("x/1/")
    await blobs.remove_all("never/there/")

    assert [await blobs.get(key) for key in gone] == [None, None, None]
    assert [await blobs.get(key) for key in stay] == [key.encode() for key in stay]
    await blobs.put("x/1/a", b"again")
    assert await blobs.get("x/1/a") == b"again"


@pytest.mark.parametrize("key", BAD_KEYS.values(), ids=BAD_KEYS.keys())
async def test_an_invalid_key_is_refused(blobs: Blobs, key: str) -> None:
    beneath = f"{key}/"
    calls = (
        blobs.put(key, b""),
        blobs.create(key, b""),
        blobs.write(key, chunked(b"")),
        blobs.get(key),
        blobs.head(key),
        blobs.open(key),
        blobs.remove(key),
        blobs.remove_all(beneath),
        blobs.list(beneath),
        blobs.list("a/", after=key),
        blobs.presign("GET", key, timedelta(minutes=1)),
    )
    for refused in calls:
        with pytest.raises(ValueError, match="key"):
            await refused


async def test_a_prefix_matches_complete_names_only(blobs: Blobs) -> None:
    await blobs.put("x/1", b"1")

    for prefix in ("x", "/", "x//", "../"):
        with pytest.raises(ValueError, match="key"):
            await blobs.remove_all(prefix)
        with pytest.raises(ValueError, match="key"):
            await blobs.list(prefix)
    assert await blobs.get("x/1") == b"1"


async def test_a_reader_never_sees_a_mixture_of_two_writes(blobs: Blobs) -> None:
    whole = [bytes([letter]) * 300_000 for letter in b"abcdefgh"]
    await blobs.put("a", whole[0])

    async def read() -> set[bytes | None]:
        return {await blobs.get("a") for _ in range(30)}

    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(read()) for _ in range(4)]
        for data in whole * 4:
            group.create_task(blobs.put("a", data))

    for reader in readers:
        assert reader.result() <= set(whole)
    assert await blobs.get("a") in whole


async def test_many_keys_can_be_written_concurrently(blobs: Blobs) -> None:
    keys = [f"many/{number % 7}/{number}" for number in range(500)]

    await asyncio.gather(*(blobs.put(key, key.encode()) for key in keys))

    assert await asyncio.gather(*(blobs.get(key) for key in keys)) == [k.encode() for k in keys]
    await blobs.remove_all("many/")
    assert set(await asyncio.gather(*(blobs.get(key) for key in keys))) == {None}


async def test_puts_and_removals_of_adjacent_keys_are_independent(blobs: Blobs) -> None:
    async def put_and_remove(number: int) -> None:
        for _ in range(20):
            await blobs.put(f"day/{number}/a", b"1")
            assert await blobs.get(f"day/{number}/a") == b"1"
            if number % 2:
                await blobs.remove(f"day/{number}/a")
            else:
                await blobs.remove_all(f"day/{number}/")

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(put_and_remove(number))
