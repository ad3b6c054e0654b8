"""
The spool for an unavailable store: which objects are spooled, and when and in which order they are
uploaded.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from atoll.blobs.availability import Availability
from atoll.blobs.base import CHUNK_SIZE, MAX_GET, PART_SIZE, RefusedByStore
from atoll.blobs.local import LocalBlobs
from atoll.blobs.spool import Spool
from atoll.blobs.spool_queue import SpoolQueue, SpoolState
from atoll.blobs.spool_uploader import SpoolUploader
from atoll.blobs.spool_writer import BLOCK
from atoll.errors import BlobsUnavailable, TemporaryError
from atoll.settings import BlobSettings
from atoll.testing import ManualClock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.blobs.base import BlobInfo

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("every_level")]


KEPT = ("workspaces/", "executions/")
MINUTE = timedelta(minutes=1)
# Puts in the spool at `argv[2]` for a store at `argv[1]`, and dies when half of it was uploaded.
DIES = """
import asyncio, os, pathlib, sys
from atoll.blobs.local import LocalBlobs
from atoll.blobs.spool import Spool
from atoll.clock import SystemClock
from atoll.settings import BlobSettings

class Remote(LocalBlobs):
    puts = 0

    async def put(self, key, data):
        Remote.puts += 1
        if Remote.puts == 5:
            os._exit(9)
        await super().put(key, data)
        if Remote.puts == 4:
            os._exit(9)

async def main():
    remote = Remote(pathlib.Path(sys.argv[1]))
    place = pathlib.Path(sys.argv[2])
    spool = Spool(remote, place, BlobSettings(), SystemClock(), prefixes=("workspaces/",))
    await spool.catch_up()

asyncio.run(main())
"""


class Remote(LocalBlobs):
    """A store that can be unavailable, and records its calls."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.away = False
        self.refused: set[str] = set()
        self.asked: list[str] = []
        self.breaks_after: int | None = None
        self.under_way = asyncio.Event()
        self.go_on: asyncio.Event | None = None

    def _check(self, what: str, key: str) -> None:
        self.asked.append(f"{what} {key}")
        if key in self.refused:
            raise RefusedByStore("The test says no.")
        if self.away:
            raise BlobsUnavailable("The test says no.")

    async def put(self, key: str, data: bytes) -> None:
        self._check("put", key)
        if self.go_on is not None:
            self.under_way.set()
            await self.go_on.wait()
        await super().put(key, data)

    async def create(self, key: str, data: bytes) -> bool:
        self._check("create", key)
        return await super().create(key, data)

    async def write(self, key: str, chunks: AsyncIterator[bytes]) -> int:
        self._check("write", key)

        async def some() -> AsyncIterator[bytes]:
            size = 0
            async for chunk in chunks:
                size += len(chunk)
                if self.breaks_after is not None and size > self.breaks_after:
                    raise BlobsUnavailable("The line broke.")
                yield chunk

        return await super().write(key, some())

    async def get(
        self, key: str, *, start: int = 0, end: int | None = None, limit: int = MAX_GET
    ) -> bytes | None:
        self._check("get", key)
        return await super().get(key, start=start, end=end, limit=limit)

    async def head(self, key: str) -> BlobInfo | None:
        self._check("head", key)
        return await super().head(key)

    async def list(
        self, prefix: str, *, after: str | None = None, limit: int = 1000
    ) -> list[BlobInfo]:
        self._check("list", prefix)
        return await super().list(prefix, after=after, limit=limit)

    async def remove(self, key: str, *, deferrable: bool = True) -> None:
        self._check("remove", key)
        await super().remove(key)

    async def remove_all(self, prefix: str, *, deferrable: bool = True) -> None:
        self._check("remove_all", prefix)
        await super().remove_all(prefix)

    async def presign(self, method: str, key: str, expires: timedelta) -> str | None:
        return f"https://s3.example.com/{key}"


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote(tmp_path / "remote")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def spool_of(remote: Remote, tmp_path: Path, clock: ManualClock, **options: object) -> Spool:
    settings = BlobSettings.model_validate(options)
    return Spool(remote, tmp_path / "spool", settings, clock, prefixes=KEPT)


@pytest.fixture
def spool(remote: Remote, tmp_path: Path, clock: ManualClock) -> Spool:
    return spool_of(remote, tmp_path, clock)


@pytest.fixture
def remote_unavailable(remote: Remote) -> Remote:
    remote.away = True
    return remote


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def read(spool: Spool, key: str) -> bytes | None:
    opened = await spool.open(key)
    return None if opened is None else b"".join([piece async for piece in opened.chunks])


def make_available(remote: Remote, clock: ManualClock) -> None:
    remote.away = False
    clock.time += 60


async def test_an_object_that_cannot_be_put_is_spooled_readable_and_uploaded_later(
    spool: Spool, remote_unavailable: Remote, clock: ManualClock
) -> None:
    await spool.put("workspaces/put", b"put")
    assert await spool.create("workspaces/create", b"create")
    assert not await spool.create("workspaces/create", b"another")
    assert await spool.write("workspaces/write", chunks(b"wr", b"ite")) == 5
    keys = ["workspaces/create", "workspaces/put", "workspaces/write"]
    values = [b"create", b"put", b"write"]

    assert spool.away == "The test says no."
    assert spool.usage == (3, 3 * BLOCK)
    assert [await spool.get(key) for key in keys] == values
    assert [await read(spool, key) for key in keys] == values
    assert await spool.get("workspaces/write", start=1, end=3) == b"ri"
    head = await spool.head("workspaces/write")
    assert head is not None
    assert head.size == 5

    make_available(remote_unavailable, clock)
    assert await spool.catch_up()

    assert spool.away is None
    assert spool.usage == (0, 0)
    assert [await remote_unavailable.get(key) for key in keys] == values
    assert [await spool.get(key) for key in keys] == values
    assert [info.key for info in await spool.list("workspaces/")] == keys


async def test_an_unavailable_store_is_not_tried_again_at_once(
    spool: Spool, remote_unavailable: Remote, clock: ManualClock
) -> None:
    for number in range(10):
        await spool.put(f"workspaces/{number}", b"1")
        with pytest.raises(TemporaryError, match="unavailable"):
            await spool.get("volumes/1")
    assert len(remote_unavailable.asked) == 1

    clock.time += 6
    await spool.put("workspaces/10", b"1")
    await spool.put("workspaces/11", b"1")
    assert len(remote_unavailable.asked) == 2


async def test_only_configured_prefixes_are_spooled(
    spool: Spool, remote_unavailable: Remote
) -> None:
    for call in (
        spool.put("volumes/1", b"1"),
        spool.create("volumes/1", b"1"),
        spool.write("volumes/1", chunks(b"1")),
        spool.get("workspaces/none"),
        spool.head("workspaces/none"),
        spool.open("workspaces/none"),
        spool.list("workspaces/"),
    ):
        with pytest.raises(TemporaryError) as caught:
            await call
        assert caught.value.code == "blobs_unavailable"
    assert spool.usage.objects == 0


async def test_manifests_are_uploaded_after_everything_put_before_them(
    spool: Spool, remote_unavailable: Remote, clock: ManualClock
) -> None:
    for number in range(4):
        await spool.put(f"workspaces/s/manifests/{number}", b"m")
        await spool.put(f"workspaces/s/data/{number}", b"d")
    make_available(remote_unavailable, clock)
    remote_unavailable.asked.clear()

    # The store is back, but what this one speaks of is not yet there.
    await spool.put("workspaces/s/manifests/9", b"m")
    assert await spool.catch_up()

    order = [asked for asked in remote_unavailable.asked if asked.startswith("put")]
    assert len(order) == 9
    assert all("/data/" in asked for asked in order[:4])
    assert all("/manifests/" in asked for asked in order[4:])
    remote_unavailable.asked.clear()
    await spool.put("workspaces/s/manifests/10", b"m")
    assert remote_unavailable.asked == ["put workspaces/s/manifests/10"]


async def test_no_manifest_is_uploaded_while_another_object_is_refused(
    spool: Spool, remote_unavailable: Remote, clock: ManualClock
) -> None:
    for key in ("workspaces/s/data/1", "workspaces/s/data/2", "workspaces/s/manifests/1"):
        await spool.put(key, b"1")
    make_available(remote_unavailable, clock)
    remote_unavailable.refused = {"workspaces/s/data/1"}

    with capture_logs() as logs:
        assert not await spool.catch_up()

    assert [line["what"] for line in logs if line["event"] == "spool.refused"] == [
        "workspaces/s/data/1"
    ]
    assert spool.away is None
    assert await remote_unavailable.get("workspaces/s/data/2") == b"1"
    assert await remote_unavailable.get("workspaces/s/manifests/1") is None
    remote_unavailable.refused = set()
    assert await spool.catch_up()
    assert await remote_unavailable.get("workspaces/s/manifests/1") == b"1"


async def test_a_store_that_refuses_one_object_counts_as_available(
    spool: Spool, remote: Remote
) -> None:
    await spool.put("volumes/1", b"1")
    remote.refused = {"workspaces/1", "volumes/2"}

    await spool.put("workspaces/1", b"waits")
    with pytest.raises(RefusedByStore):
        await spool.put("volumes/2", b"1")

    assert spool.away is None
    assert await spool.get("volumes/1") == b"1"
    assert await spool.get("workspaces/1") == b"waits"


async def test_many_refusals_end_a_pass_with_one_log_line(
    spool: Spool, remote_unavailable: Remote, clock: ManualClock
) -> None:
    keys = [f"workspaces/{number:03}" for number in range(120)]
    for key in keys:
        await spool.put(key, b"1")
    make_available(remote_unavailable, clock)
    remote_unavailable.refused = set(keys)
    remote_unavailable.asked.clear()

    with capture_logs() as logs:
        assert not await spool.catch_up()

    assert [line["event"] for line in logs] == ["blobs.back", "spool.refused"]
    assert 200 <= len(remote_unavailable.asked) < 220
    assert spool.usage.objects == 120


async def test_a_put_waits_for_an_earlier_removal_that_was_refused(
    spool: Spool, remote_unavailable: Remote, clock: ManualClock
) -> None:
    await spool.remove_all("workspaces/s/")
    await spool.put("workspaces/s/1", b"new")
    await spool.put("workspaces/t/1", b"new")
    make_available(remote_unavailable, clock)
    remote_unavailable.refused = {"workspaces/s/"}

    assert not await spool.catch_up()
    assert await remote_unavailable.get("workspaces/s/1") is None
    assert await remote_unavailable.get("workspaces/t/1") == b"new"

    remote_unavailable.refused = set()
    assert await spool.catch_up()
    assert await remote_unavailable.get("workspaces/s/1") == b"new"


async def test_removals_are_queued_too_and_run_first(
    spool: Spool, remote: Remote, clock: ManualClock
) -> None:
    old = ("workspaces/s/1", "workspaces/s/2", "workspaces/t/1", "requests/1", "volumes/1")
    for key in old:
        await spool.put(key, b"old")
    remote.away = True

    await spool.remove_all("workspaces/s/")
    await spool.remove("requests/1")
    await spool.put("workspaces/s/2", b"new")
    await spool.put("workspaces/t/1", b"new")
    await spool.remove("workspaces/t/1")

    assert [await spool.get(key) for key in old[:4]] == [None, b"new", None, None]
    assert await spool.head("workspaces/s/1") is None
    assert await spool.open("workspaces/t/1") is None
    make_available(remote, clock)
    assert [info.key for info in await spool.list("workspaces/")] == ["workspaces/s/2"]
    assert await spool.catch_up()
    assert [await remote.get(key) for key in old] == [None, b"new", None, None, b"old"]
    assert spool.usage == (0, 0)


async def test_a_removal_that_cannot_be_deferred_fails_and_removes_nothing(
    spool: Spool, remote: Remote, clock: ManualClock
) -> None:
    await spool.put("volumes/v/1", b"kept")
    remote.away = True
    with pytest.raises(TemporaryError):
        await spool.remove("volumes/v/1", deferrable=False)
    with pytest.raises(TemporaryError):
        await spool.remove_all("volumes/v/", deferrable=False)
    assert spool.usage == (0, 0)
    make_available(remote, clock)
    assert await spool.catch_up()
    assert await remote.get("volumes/v/1") == b"kept"


async def test_a_list_is_complete_although_removed_objects_are_omitted(
    spool: Spool, remote: Remote, clock: ManualClock
) -> None:
    keys = [f"workspaces/{number}" for number in range(10)]
    for key in keys:
        await spool.put(key, b"1")
    remote.away = True
    for key in keys[:6]:
        await spool.remove(key)
    await spool.put("workspaces/7a", b"1")
    make_available(remote, clock)

    first = await spool.list("workspaces/", limit=3)
    rest = await spool.list("workspaces/", after=first[-1].key, limit=3)

    assert [info.key[11:] for info in first] == ["6", "7", "7a"]
    assert [info.key[11:] for info in rest] == ["8", "9"]


async def test_an_object_that_cannot_be_spooled_does_not_overtake_a_removal(
    spool: Spool, remote: Remote, clock: ManualClock
) -> None:
    await spool.put("volumes/v/1", b"old")
    remote.away = True
    await spool.remove_all("volumes/v/")
    with pytest.raises(TemporaryError, match="unavailable"):
        await spool.put("volumes/v/2", b"new")
    make_available(remote, clock)

    await spool.put("volumes/v/2", b"new")
    assert await spool.catch_up()

    assert await spool.get("volumes/v/1") is None
    assert await spool.get("volumes/v/2") == b"new"


async def test_a_newer_object_replaces_a_spooled_one(
    spool: Spool, remote_unavailable: Remote, clock: ManualClock
) -> None:
    await spool.put("workspaces/1", b"old" * 5000)
    make_available(remote_unavailable, clock)

    await spool.put("workspaces/1", b"new")

    assert spool.usage == (1, BLOCK)
    assert await spool.get("workspaces/1") == b"new"
    assert await remote_unavailable.get("workspaces/1") is None
    assert await spool.catch_up()
    assert await remote_unavailable.get("workspaces/1") == b"new"


async def test_an_existing_object_wins_over_a_spooled_create(
    spool: Spool, remote_unavailable: Remote, clock: ManualClock
) -> None:
    assert await spool.create("workspaces/1", b"mine")
    make_available(remote_unavailable, clock)
    await remote_unavailable.put("workspaces/1", b"of another node")

    assert await spool.catch_up()

    assert await spool.get("workspaces/1") == b"of another node"


async def test_a_connection_lost_during_a_write_loses_no_data(
    spool: Spool, remote: Remote, clock: ManualClock
) -> None:
    remote.breaks_after = 2 * CHUNK_SIZE
    parts = [bytes([number]) * CHUNK_SIZE for number in range(5)]

    assert await spool.write("workspaces/1", chunks(*parts)) == 5 * CHUNK_SIZE

    assert await read(spool, "workspaces/1") == b"".join(parts)
    remote.breaks_after = None
    make_available(remote, clock)
    assert await spool.catch_up()
    assert await remote.get("workspaces/1") == b"".join(parts)
    assert spool.usage == (0, 0)


async def test_a_successful_write_leaves_nothing_in_the_spool(
    spool: Spool, remote: Remote, tmp_path: Path
) -> None:
    assert (
        await spool.write("workspaces/1", chunks(b"1" * PART_SIZE, b"2" * PART_SIZE))
        == 2 * PART_SIZE
    )

    assert await remote.get("workspaces/1") == b"1" * PART_SIZE + b"2" * PART_SIZE
    assert spool.usage == (0, 0)
    assert os.listdir(tmp_path / "spool" / "drafts") == []


async def test_a_failing_source_leaves_nothing(spool: Spool, remote_unavailable: Remote) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"1" * PART_SIZE
        raise ConnectionResetError("the client went away")

    with pytest.raises(ConnectionResetError):
        await spool.write("workspaces/1", broken())

    assert spool.usage == (0, 0)


async def test_a_full_spool_accepts_no_more_until_space_is_free(
    remote: Remote, tmp_path: Path, clock: ManualClock
) -> None:
    spool = spool_of(remote, tmp_path, clock, spool_size=2**20)
    await spool.write("workspaces/through", chunks(b"1" * 2**21))
    assert await remote.get("workspaces/through") == b"1" * 2**21
    remote.away = True
    await spool.put("workspaces/1", b"1" * 1_000_000)

    refused = (
        spool.put("workspaces/2", b"1" * 100_000),
        spool.create("workspaces/2", b"1" * 100_000),
        spool.write("workspaces/2", chunks(b"1" * 100_000)),
    )
    for call in refused:
        with pytest.raises(TemporaryError) as caught:
            await call
        assert caught.value.code == "spool_full"
    assert [info.key for info in SpoolQueue(tmp_path / "spool", 0).objects("", None, 9)] == [
        "workspaces/1"
    ]

    await spool.remove("workspaces/1")
    await spool.put("workspaces/2", b"1" * 100_000)
    make_available(remote, clock)
    assert await spool.catch_up()
    assert spool.usage == (0, 0)


async def test_expired_entries_of_the_spool_are_dropped_and_logged(
    spool: Spool, away: Remote, clock: ManualClock, tmp_path: Path
) -> None:
    uploader = SpoolUploader(
        away,
        SpoolQueue(tmp_path / "spool", BlobSettings().spool_size),
        Availability(away, KEPT[0], BlobSettings(), clock),
        clock,
        BlobSettings().spool_ttl,
    )
    await spool.put("workspaces/old", b"1")
    await spool.remove("requests/1")
    found = await spool.head("workspaces/old")
    assert found is not None
    clock.time = found.modified_at.timestamp() + 24 * 3600 - 5
    await uploader.drop_expired()
    assert spool.usage.objects == 2

    clock.time += 3600
    with capture_logs() as logs:
        await uploader.drop_expired()

    dropped = [line for line in logs if line["event"] == "spool.dropped"]
    assert [line.get("key", line.get("removal")) for line in dropped] == [
        "workspaces/old",
        "requests/1",
    ]
    assert spool.usage == (0, 0)


async def test_a_kill_during_the_upload_of_the_spool_loses_nothing(
    spool: Spool, remote_unavailable: Remote, clock: ManualClock, tmp_path: Path
) -> None:
    keys = [f"workspaces/{number}" for number in range(10)]
    for key in keys:
        await spool.put(key, key.encode())

    for _ in range(2):
        program = [sys.executable, "-c", DIES, str(tmp_path / "remote"), str(tmp_path / "spool")]
        died = await asyncio.to_thread(subprocess.run, program, check=False)
        assert died.returncode == 9
        assert [await spool.get(key) for key in keys[8:]] == [key.encode() for key in keys[8:]]

    make_available(remote_unavailable, clock)
    assert await spool.catch_up()
    assert [await remote_unavailable.get(key) for key in keys] == [key.encode() for key in keys]
    assert spool.usage == (0, 0)


async def test_unfinished_writes_of_a_kill_are_removed_and_usage_is_recounted(
    remote: Remote, tmp_path: Path, clock: ManualClock
) -> None:
    waiting = SpoolQueue(tmp_path / "spool", 2**30)
    waiting.put("workspaces/1", b"1")
    living = waiting.writer()
    living.write(b"1")
    (tmp_path / "spool" / "drafts" / "dead").write_bytes(b"half")
    (tmp_path / "spool" / "used").write_text("77 777777777")

    waiting.recount()

    assert waiting.used() == (1, 2 * BLOCK)
    assert living.commit("workspaces/2")
    living.drop()
    assert waiting.state_of("workspaces/2") is SpoolState.OBJECT


async def test_processes_that_share_the_spool_agree(
    remote: Remote, tmp_path: Path, clock: ManualClock
) -> None:
    remote.away = True
    spools = [spool_of(remote, tmp_path, clock) for _ in range(3)]
    keys = [f"workspaces/{number}" for number in range(60)]
    await asyncio.gather(*(spools[n % 3].put(key, key.encode()) for n, key in enumerate(keys)))
    assert {spool.usage for spool in spools} == {(60, 60 * BLOCK)}
    created = await asyncio.gather(*(s.create("workspaces/x", b"1") for s in spools))
    assert sorted(created) == [False, False, True]
    make_available(remote, clock)
    remote.asked.clear()

    done = await asyncio.gather(*(spool.catch_up() for spool in spools))

    assert any(done)
    puts = [asked for asked in remote.asked if asked.startswith("put")]
    assert sorted(puts) == sorted(f"put {key}" for key in keys)
    assert [await spools[1].get(key) for key in keys] == [key.encode() for key in keys]


async def test_an_object_replaced_or_removed_during_its_upload_is_neither_lost_nor_restored(
    spool: Spool, remote_unavailable: Remote, clock: ManualClock
) -> None:
    await spool.put("workspaces/1", b"old")
    await spool.put("workspaces/2", b"old")
    make_available(remote_unavailable, clock)
    remote_unavailable.go_on = asyncio.Event()

    moving = asyncio.create_task(spool.catch_up())
    await remote_unavailable.under_way.wait()
    await spool.put("workspaces/1", b"new")
    await spool.remove("workspaces/2")
    remote_unavailable.go_on.set()

    assert await moving
    assert await remote_unavailable.get("workspaces/1") == b"new"
    assert await remote_unavailable.get("workspaces/2") is None
    assert spool.usage == (0, 0)


async def test_a_spooled_object_has_no_link(
    spool: Spool, remote: Remote, clock: ManualClock
) -> None:
    assert await spool.presign("GET", "workspaces/1", MINUTE) == (
        "https://s3.example.com/workspaces/1"
    )
    remote.away = True
    await spool.put("workspaces/1", b"1")
    assert await spool.presign("PUT", "workspaces/2", MINUTE) is None
    make_available(remote, clock)
    await spool.list("workspaces/")
    assert await spool.presign("GET", "workspaces/1", MINUTE) is None
    assert await spool.catch_up()
    assert await spool.presign("GET", "workspaces/1", MINUTE) is not None


async def test_the_loop_uploads_the_spool_and_reports_an_unavailable_store_at_the_start(
    remote: Remote, tmp_path: Path, clock: ManualClock
) -> None:
    remote.away = True
    spool = spool_of(remote, tmp_path, clock, retry_after=0.01)
    with capture_logs() as logs:
        loop = asyncio.create_task(spool.run())
        await spool.put("workspaces/1", b"1")
        async with asyncio.timeout(30):
            while spool.away is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            remote.away = False
            while spool.usage.objects:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop

    assert [line["event"] for line in logs] == ["blobs.away", "blobs.back"]
    assert await remote.get("workspaces/1") == b"1"


async def test_a_prefix_with_spooled_objects_is_not_synced(
    spool: Spool, remote_unavailable: Remote, clock: ManualClock
) -> None:
    await spool.put("workspaces/s1/data/a", b"1")
    await spool.remove("workspaces/s2/data/a")
    await spool.remove_all("exports/s3/")

    assert not await spool.is_synced("workspaces/s1/")
    assert not await spool.is_synced("workspaces/s2/")
    assert not await spool.is_synced("exports/s3/")
    assert not await spool.is_synced("workspaces/")
    assert await spool.is_synced("workspaces/s3/")
    assert await spool.is_synced("workspaces/s/")

    make_available(remote_unavailable, clock)
    assert await spool.catch_up()
    for prefix in ("workspaces/s1/", "workspaces/s2/", "exports/s3/", "workspaces/"):
        assert await spool.is_synced(prefix)


async def test_a_removal_that_cannot_be_deferred_is_done_at_once_or_not_at_all(
    spool: Spool, remote: Remote, clock: ManualClock
) -> None:
    await spool.put("workspaces/a", b"1")
    remote.away = True
    with pytest.raises(TemporaryError) as caught:
        await spool.remove("workspaces/a", deferrable=False)
    assert caught.value.code == "blobs_unavailable"
    await spool.put("workspaces/b", b"2")
    with pytest.raises(TemporaryError):
        await spool.remove("workspaces/b", deferrable=False)

    make_available(remote, clock)
    assert await spool.catch_up()
    assert await spool.get("workspaces/a") == b"1"
    assert await spool.get("workspaces/b") == b"2"
    await spool.remove("workspaces/a", deferrable=False)
    assert await spool.get("workspaces/a") is None
