"""Large objects in pieces, objects that are made once, lists by page."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from atoll.blobs.base import CHUNK_SIZE, PART_SIZE
from atoll.errors import TemporaryError
from tests.contract.blobs.conftest import chunked
from tests.contract.blobs.test_blobs import RANGES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.blobs.base import Blobs

pytestmark = pytest.mark.anyio

MiB = 2**20
LARGE = 3 * PART_SIZE + 12_345


async def pieces_of(size: int, each: int = 700_001) -> AsyncIterator[bytes]:
    for begin in range(0, size, each):
        yield bytes([begin // each % 251]) * min(each, size - begin)


async def digest_of(pieces: AsyncIterator[bytes]) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    async for piece in pieces:
        assert 0 < len(piece) <= CHUNK_SIZE
        size += len(piece)
        digest.update(piece)
    return size, digest.hexdigest()


async def keys_of(blobs: Blobs, prefix: str, limit: int) -> list[str]:
    keys: list[str] = []
    while True:
        page = await blobs.list(prefix, after=keys[-1] if keys else None, limit=limit)
        keys += [info.key for info in page]
        if len(page) < limit:
            return keys


@pytest.mark.parametrize("size", [0, 1, PART_SIZE - 1, PART_SIZE, PART_SIZE + 1, LARGE])
async def test_written_chunks_can_be_streamed_back(blobs: Blobs, size: int) -> None:
    written = await blobs.write("a/large", pieces_of(size))
    opened = await blobs.open("a/large")

    assert opened is not None
    assert written == opened.info.size == size
    assert await digest_of(opened.chunks) == await digest_of(pieces_of(size))


async def test_a_write_replaces_the_old_object(blobs: Blobs) -> None:
    await blobs.put("a/b", b"before" * MiB)

    assert await blobs.write("a/b", chunked(b"", b"af", b"", b"ter")) == 5

    assert await blobs.get("a/b") == b"after"


@pytest.mark.parametrize("size", [3, 2 * PART_SIZE])
async def test_a_write_whose_source_fails_keeps_the_old_object(blobs: Blobs, size: int) -> None:
    async def broken() -> AsyncIterator[bytes]:
        async for piece in pieces_of(size):
            yield piece
        raise ConnectionResetError("the client went away")

    await blobs.put("a/b", b"before")

    for key in ("a/b", "a/new"):
        with pytest.raises(ConnectionResetError, match="went away"):
            await blobs.write(key, broken())

    assert await blobs.get("a/b") == b"before"
    assert await blobs.get("a/new") is None
    assert [info.key for info in await blobs.list("a/")] == ["a/b"]


async def test_a_cancelled_write_keeps_the_old_object(blobs: Blobs) -> None:
    waits = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        async for piece in pieces_of(2 * PART_SIZE):
            yield piece
        waits.set()
        await asyncio.Event().wait()

    await blobs.put("a/b", b"before")
    writes = [asyncio.create_task(blobs.write(key, slow())) for key in ("a/b", "a/new")]
    await waits.wait()
    for write in writes:
        write.cancel()
    done = await asyncio.gather(*writes, return_exceptions=True)

    assert all(isinstance(one, asyncio.CancelledError) for one in done)
    assert await blobs.get("a/b") == b"before"
    assert await blobs.get("a/new") is None


async def test_writers_that_wait_for_their_chunks_delay_no_other_call(blobs: Blobs) -> None:
    begun = [asyncio.Event() for _ in range(40)]
    go_on = asyncio.Event()

    async def slow(number: int) -> AsyncIterator[bytes]:
        yield b"1"
        begun[number].set()
        await go_on.wait()
        yield b"2"

    async with asyncio.TaskGroup() as group:
        for number in range(len(begun)):
            group.create_task(blobs.write(f"a/{number}", slow(number)))
        for event in begun:
            await event.wait()
        await blobs.put("a/quick", b"1")
        assert await blobs.get("a/quick") == b"1"
        go_on.set()

    assert await blobs.get("a/39") == b"12"


@pytest.mark.parametrize(("start", "end", "part"), RANGES.values(), ids=RANGES.keys())
async def test_a_range_is_opened(blobs: Blobs, start: int, end: int | None, part: bytes) -> None:
    await blobs.put("a/b", b"0123456789")

    opened = await blobs.open("a/b", start=start, end=end)

    assert opened is not None
    assert b"".join([piece async for piece in opened.chunks]) == part
    assert opened.info.size == 10


async def test_a_range_over_several_pieces(blobs: Blobs) -> None:
    data = bytes(range(256)) * (2 * CHUNK_SIZE // 256 + 7)
    await blobs.put("a/b", data)

    opened = await blobs.open("a/b", start=5, end=2 * CHUNK_SIZE + 6)

    assert opened is not None
    assert b"".join([piece async for piece in opened.chunks]) == data[5 : 2 * CHUNK_SIZE + 6]


async def test_an_open_stream_can_be_abandoned(blobs: Blobs) -> None:
    await blobs.put("a/b", b"1" * (CHUNK_SIZE + 1))

    never = await blobs.open("a/b")
    left = await blobs.open("a/b")

    assert never is not None
    assert left is not None
    async for piece in left.chunks:
        assert len(piece) == CHUNK_SIZE
        break


@pytest.mark.parametrize("replaced", [True, False], ids=["replaced", "removed"])
async def test_a_reader_never_gets_chunks_of_two_objects(blobs: Blobs, replaced: bool) -> None:
    await blobs.put("a/b", b"o" * (3 * CHUNK_SIZE))
    opened = await blobs.open("a/b")
    assert opened is not None

    got, changed = b"", []
    try:
        async for piece in opened.chunks:
            if not got and replaced:
                await blobs.put("a/b", b"n" * (3 * CHUNK_SIZE + 1))
            elif not got:
                await blobs.remove("a/b")
            got += piece
    except TemporaryError as error:
        changed.append(error.code)

    assert set(got) == set(b"o")
    assert changed == ["blob_changed"] or len(got) == 3 * CHUNK_SIZE


async def test_head_describes_an_object(blobs: Blobs) -> None:
    before = datetime.now(UTC) - timedelta(seconds=2)
    await blobs.put("a/b", b"12345")

    first = await blobs.head("a/b")
    again = await blobs.head("a/b")
    await blobs.put("a/b", b"1234567")
    after = await blobs.head("a/b")

    assert first is not None
    assert after is not None
    assert (first.key, first.size, after.size) == ("a/b", 5, 7)
    assert first == again
    assert first.etag != after.etag
    assert before <= first.modified_at <= datetime.now(UTC) + timedelta(seconds=2)
    assert await blobs.list("a/") == [after]


async def test_head_and_open_of_a_missing_object_return_null(blobs: Blobs) -> None:
    assert await blobs.head("a/b") is None
    assert await blobs.open("a/b") is None
    assert await blobs.open("a/b", start=3, end=5) is None
    assert await blobs.list("a/") == []


async def test_one_of_many_concurrent_creates_succeeds(blobs: Blobs) -> None:
    created = await asyncio.gather(
        *(blobs.create("a/b", str(number).encode()) for number in range(10))
    )

    assert sorted(created) == [False] * 9 + [True]
    assert await blobs.get("a/b") == str(created.index(True)).encode()
    await blobs.remove("a/b")
    assert await blobs.create("a/b", b"again")


async def test_create_keeps_an_existing_object(blobs: Blobs) -> None:
    await blobs.put("a/b", b"before")

    assert not await blobs.create("a/b", b"after")

    assert await blobs.get("a/b") == b"before"


@pytest.mark.parametrize("limit", [1, 7, 1000])
async def test_a_list_is_paged_in_the_order_of_keys(blobs: Blobs, limit: int) -> None:
    keys = [f"x/{number:03}" for number in range(30)] + [f"x/d{n}/{m}" for n in "abc" for m in "12"]
    others = ["y/1", "x-y/1", "xx/1", "w/1"]
    await asyncio.gather(*(blobs.put(key, b"1") for key in [*keys, *others]))

    assert await keys_of(blobs, "x/", limit) == sorted(keys)
    assert await keys_of(blobs, "x/db/", limit) == ["x/db/1", "x/db/2"]
    assert await keys_of(blobs, "x/none/", limit) == []


async def test_a_list_can_start_after_a_missing_key(blobs: Blobs) -> None:
    for key in ("x/a/1", "x/b/1", "x/c/1"):
        await blobs.put(key, b"1")

    page = await blobs.list("x/", after="x/a/5", limit=1)

    assert [info.key for info in page] == ["x/b/1"]


@pytest.mark.parametrize("limit", [0, -1, 1001])
async def test_the_size_of_a_page_is_limited(blobs: Blobs, limit: int) -> None:
    with pytest.raises(ValueError, match="page"):
        await blobs.list("x/", limit=limit)


@pytest.mark.parametrize("seconds", [0, -1, 7 * 24 * 3600 + 1])
async def test_the_life_of_a_link_is_limited_to_what_s3_accepts(blobs: Blobs, seconds: int) -> None:
    with pytest.raises(ValueError, match="link"):
        await blobs.presign("GET", "a/b", timedelta(seconds=seconds))
