"""Workspaces are saved to the blob store and restored by real executors."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import sqlite3
import stat
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.blobs.local import LocalBlobs
from atoll.coordination.leases import Leases
from atoll.coordination.memory import MemoryCoordination
from atoll.errors import NotFound, PermanentError, TemporaryError
from atoll.model.manifest import (
    MAX_OBJECT,
    Entry,
    Manifest,
    PageWriter,
    Part,
    spans,
)
from atoll.model.manifest_parser import read_manifest, read_page
from atoll.service.checkpoints import incoming_file
from atoll.service.checkpoints.service import Checkpoints, Restored
from atoll.settings import Settings
from atoll.stores.sql.store import SqlStore
from atoll.testing import ManualClock
from tests import executors
from tests.parts import checkpoints_on

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.link.client import Link

pytestmark = pytest.mark.anyio

ME, SESSION = "replica", "sess_1"
MEGABYTE = 1 << 20


class Breaking(LocalBlobs):
    """A blob store that can become unavailable after a number of puts."""

    left: int | None = None

    async def put(self, key: str, data: bytes) -> None:
        if self.left is not None:
            if self.left == 0:
                raise TemporaryError("The test says no.", code="save_timeout")
            self.left -= 1
        await super().put(key, data)


class Environment:
    """A blob store and any number of nodes."""

    def __init__(
        self, place: Path, bubblewrap: str, checkpoints: Checkpoints, breaking: Breaking
    ) -> None:
        self.breaking = breaking
        self.place = place
        self.blobs = place / "blobs"
        self._bubblewrap = bubblewrap
        self.checkpoints = checkpoints
        self._stack = AsyncExitStack()
        self.last: Restored | None = None

    async def node(self, name: str) -> tuple[Path, Link]:
        """Start an executor; returns its workspace and the link to it."""
        home = self.place / name
        home.mkdir()
        started = self._stack.enter_context(executors.executor(self._bubblewrap, home))
        link = await started.connect()
        self._stack.callback(link.close)
        return home / "workspace", link

    async def restored(self, name: str) -> Path:
        workspace, link = await self.node(name)

        async def again() -> Link:
            nonlocal workspace
            workspace, other = await self.node(f"{workspace.parent.name} again")
            return other

        self.last = await self.checkpoints.restore(SESSION, link, again)
        return workspace

    def objects(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self.blobs.glob("*/*/data/*")}

    def manifest(self) -> Manifest:
        return read_manifest(max(self.blobs.glob("*/*/manifests/*")).read_bytes(), SESSION)

    async def close(self) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def made(place: Path, bubblewrap: str, *, backups: int = 2) -> AsyncIterator[Environment]:
    given, clock = Settings(data_dir=place), ManualClock()
    store = SqlStore(
        [f"sqlite:///{place / 'atoll.db'}"], sqlite=given.sqlite, database=given.database
    )
    coordination = MemoryCoordination(ME, given.coordination, timedelta(hours=1), clock)
    leases = Leases(coordination, clock, given.coordination)
    await store.open()
    await coordination.open()
    await leases.start()
    blobs = Breaking(place / "blobs")
    checkpoints = checkpoints_on(store, blobs, leases, clock, "node_1", backups=backups)
    environment = Environment(place, bubblewrap, checkpoints, blobs)
    try:
        yield environment
    finally:
        await environment.close()
        await coordination.close()
        await store.close()


@pytest.fixture
async def environment(tmp_path: Path, bubblewrap: str) -> AsyncIterator[Environment]:
    async with made(tmp_path, bubblewrap) as environment:
        yield environment


def tree(top: Path) -> dict[str, tuple[object, ...]]:
    """All that a checkpoint promises to keep."""
    found: dict[str, tuple[object, ...]] = {}
    for directory, names, files in os.walk(os.fsencode(top)):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            shown = os.fsdecode(os.path.relpath(path, os.fsencode(top)))
            mode = stat.S_IMODE(status.st_mode)
            if stat.S_ISLNK(status.st_mode):
                found[shown] = ("link", os.readlink(path), status.st_mtime_ns)
            elif stat.S_ISDIR(status.st_mode):
                found[shown] = ("directory", mode, status.st_mtime_ns)
            elif stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    found[shown] = ("file", mode, status.st_mtime_ns, file.read())
    return found


async def test_a_restored_workspace_equals_the_saved_one(environment: Environment) -> None:
    workspace, link = await environment.node("one")
    (workspace / "deep" / "er").mkdir(parents=True)
    (workspace / "deep" / "er" / "file").write_text("content")
    (workspace / "empty").touch()
    (workspace / "no files").mkdir()
    (workspace / "run").write_text("#!/bin/sh\n")
    (workspace / "run").chmod(0o755)
    (workspace / "link").symlink_to("deep/er/file")
    (workspace / "out").symlink_to("/etc/passwd")
    (workspace / "dangling").symlink_to("nowhere")
    (workspace / "closed").mkdir()
    (workspace / "closed" / "in it").write_text("still there")
    (workspace / "closed").chmod(0o555)
    (workspace / os.fsdecode(b"not utf-8 \xff")).write_bytes(b"\x00\xff")
    (workspace / "new\nline and \N{SNOWMAN}").write_text("odd")
    (workspace / "large").write_bytes(random.Random(1).randbytes(20 * MEGABYTE + 7))
    os.mkfifo(workspace / "pipe")
    os.utime(workspace / "run", ns=(1_000_000_007, 1_000_000_007))

    taken = await environment.checkpoints.take(SESSION, link)

    assert taken is not None
    assert (taken.number, taken.files) == (1, 7)
    other = await environment.restored("two")
    expected = tree(workspace)
    assert tree(other) == expected
    assert "pipe" not in {path.name for path in other.iterdir()}


async def test_files_without_permissions_for_their_owner_are_saved_too(
    environment: Environment,
) -> None:
    workspace, link = await environment.node("one")
    (workspace / "shut").mkdir()
    (workspace / "shut" / "secret").write_text("kept")
    (workspace / "shut" / "secret").chmod(0)
    (workspace / "shut").chmod(0)

    await environment.checkpoints.take(SESSION, link)

    other = await environment.restored("two")
    assert stat.S_IMODE((other / "shut").stat().st_mode) == 0
    (other / "shut").chmod(0o700)
    assert stat.S_IMODE((other / "shut" / "secret").stat().st_mode) == 0
    (other / "shut" / "secret").chmod(0o600)
    assert (other / "shut" / "secret").read_text() == "kept"
    assert stat.S_IMODE((workspace / "shut").stat().st_mode) == 0


async def test_an_empty_workspace_needs_no_checkpoint(environment: Environment) -> None:
    _, link = await environment.node("one")

    assert await environment.checkpoints.take(SESSION, link) is None
    with pytest.raises(NotFound) as refused:
        await environment.restored("two")
    assert refused.value.code == "checkpoint_not_found"


async def test_an_unchanged_workspace_is_not_written_again(environment: Environment) -> None:
    workspace, link = await environment.node("one")
    (workspace / "a").write_text("1")
    first = await environment.checkpoints.take(SESSION, link)
    stored = environment.objects()

    assert await environment.checkpoints.take(SESSION, link) == first
    assert environment.objects() == stored


async def test_of_two_concurrent_checkpoints_the_second_builds_on_the_first(
    environment: Environment,
) -> None:
    workspace, link = await environment.node("one")
    (workspace / "file").write_text("first")
    await environment.checkpoints.take(SESSION, link)
    (workspace / "file").write_text("second")
    taken = await asyncio.gather(*(environment.checkpoints.take(SESSION, link) for _ in range(3)))
    assert [each.number for each in taken if each is not None] == [2, 2, 2]
    assert tree(await environment.restored("two")) == tree(workspace)


async def test_only_changed_data_is_stored_again(environment: Environment) -> None:
    workspace, link = await environment.node("one")
    content = random.Random(2).randbytes(3 * MAX_OBJECT)
    (workspace / "large").write_bytes(content)
    for number in range(300):
        (workspace / f"{number}").write_text(f"small {number}")
    await environment.checkpoints.take(SESSION, link)
    before = environment.objects()

    with (workspace / "large").open("r+b") as file:
        file.seek(MAX_OBJECT + 5)
        file.write(b"changed")
    (workspace / "7").write_text("another seven")
    (workspace / "8").unlink()
    (workspace / "9").rename(workspace / "nine")
    await environment.checkpoints.take(SESSION, link)

    added = {name: size for name, size in environment.objects().items() if name not in before}
    assert sum(added.values()) < 1.1 * MAX_OBJECT
    assert tree(await environment.restored("two")) == tree(workspace)


async def test_unused_objects_are_removed_with_the_next_but_one_checkpoint(
    environment: Environment,
) -> None:
    workspace, link = await environment.node("one")
    for round_ in range(12):
        (workspace / "file").write_bytes(random.Random(round_).randbytes(2 * MEGABYTE))
        await environment.checkpoints.take(SESSION, link)

    assert sum(environment.objects().values()) < 5 * MEGABYTE
    assert len(list(environment.blobs.glob("*/*/manifests/*"))) <= 2


async def test_content_that_was_restored_is_not_removed(environment: Environment) -> None:
    workspace, link = await environment.node("a")
    for content in ("first", "second", "first", "third", "first"):
        (workspace / "file").write_text(content)
        await environment.checkpoints.take(SESSION, link)
    restored = await environment.restored("b")
    assert (restored / "file").read_text() == "first"


async def test_mostly_unused_objects_are_rewritten(environment: Environment) -> None:
    workspace, link = await environment.node("one")
    for number in range(100):
        (workspace / f"{number}").write_bytes(random.Random(number).randbytes(10_000))
    await environment.checkpoints.take(SESSION, link)
    for number in range(90):
        (workspace / f"{number}").unlink()
    for round_ in range(3):
        (workspace / "other").write_text(f"{round_}")
        await environment.checkpoints.take(SESSION, link)

    assert sum(environment.objects().values()) < 250_000
    assert tree(await environment.restored("two")) == tree(workspace)


async def test_the_same_content_is_stored_once(environment: Environment) -> None:
    workspace, link = await environment.node("one")
    block, piece = random.Random(3).randbytes(MAX_OBJECT), random.Random(4).randbytes(50_000)
    for number in range(3):
        (workspace / f"large {number}").write_bytes(block)
        (workspace / f"small {number}").write_bytes(piece)

    await environment.checkpoints.take(SESSION, link)

    assert sum(environment.objects().values()) < MAX_OBJECT + 60_000
    assert tree(await environment.restored("two")) == tree(workspace)


async def test_a_sparse_file_uses_no_space_and_keeps_its_holes(environment: Environment) -> None:
    workspace, link = await environment.node("one")
    with (workspace / "sparse").open("wb") as file:
        file.truncate(3 << 30)
        file.seek(1 << 30)
        file.write(b"here")

    await environment.checkpoints.take(SESSION, link)

    assert sum(environment.objects().values()) < MEGABYTE
    status = (await environment.restored("two") / "sparse").stat()
    assert (status.st_size, status.st_blocks * 512 < MEGABYTE) == (3 << 30, True)
    with (environment.place / "two" / "workspace" / "sparse").open("rb") as file:
        file.seek((1 << 30) - 1)
        assert file.read(6) == b"\0here\0"


async def test_a_database_in_the_workspace_is_restored_consistently(
    environment: Environment,
) -> None:
    workspace, link = await environment.node("one")
    database = sqlite3.connect(workspace / "data.db")
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE numbers (value INTEGER)")
    with database:
        database.executemany("INSERT INTO numbers VALUES (?)", [(n,) for n in range(20_000)])

    await environment.checkpoints.take(SESSION, link)

    database.close()
    copy = sqlite3.connect(await environment.restored("two") / "data.db")
    assert copy.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert copy.execute("SELECT count(*), sum(value) FROM numbers").fetchone() == (
        20_000,
        sum(range(20_000)),
    )
    copy.close()


@pytest.mark.slow
async def test_twenty_thousand_small_files_are_restored(environment: Environment) -> None:
    workspace, link = await environment.node("one")
    for number in range(20):
        directory = workspace / f"d{number}"
        directory.mkdir()
        for each in range(1000):
            (directory / f"f{each}").write_bytes(b"%d" % (number * each))

    taken = await environment.checkpoints.take(SESSION, link)

    assert taken is not None
    assert taken.files == 20_000
    assert len(environment.objects()) < 200
    other = await environment.restored("two")
    assert sum(len(files) for _, _, files in os.walk(other)) == 20_000
    assert (other / "d19" / "f999").read_bytes() == b"%d" % (19 * 999)


async def test_damage_in_the_blob_store_is_detected(environment: Environment) -> None:
    workspace, link = await environment.node("one")
    (workspace / "file").write_bytes(random.Random(5).randbytes(MEGABYTE))
    await environment.checkpoints.take(SESSION, link)
    largest = max(environment.blobs.glob("*/*/data/*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[100] ^= 1
    largest.write_bytes(data)

    with pytest.raises(PermanentError) as refused:
        await environment.restored("two")
    assert refused.value.code == "checkpoint_damaged"
    # And it is no reason not to take another.
    manifest = next(environment.blobs.glob("*/*/manifests/*"))
    manifest.unlink()
    (workspace / "more").write_text("x")
    largest.unlink()
    await environment.checkpoints.take(SESSION, link)
    assert tree(await environment.restored("three")) == tree(workspace)


@pytest.mark.slow
async def test_files_changed_during_a_checkpoint_do_not_damage_others(
    environment: Environment,
) -> None:
    workspace, link = await environment.node("one")
    for number in range(200):
        (workspace / f"{number:03}").write_bytes(random.Random(number).randbytes(200_000))
    stop = workspace / "stop"
    churn = (
        "import os, random\n"
        f"os.chdir({str(workspace)!r})\n"
        "while not os.path.exists('stop'):\n"
        "    name = '%03d' % random.randrange(100)\n"
        "    try:\n"
        "        os.rename(name, 'moved')\n"
        "        os.symlink('/etc/passwd', name)\n"
        "        os.unlink(name)\n"
        "        os.rename('moved', name)\n"
        "        open(name, 'ab').write(b'x')\n"
        "    except OSError: pass\n"
    )
    import asyncio
    import sys

    process = await asyncio.create_subprocess_exec(sys.executable, "-c", churn)
    try:
        for _ in range(3):
            assert await environment.checkpoints.take(SESSION, link) is not None
    finally:
        stop.touch()
        await process.wait()
    assert await environment.checkpoints.take(SESSION, link) is not None
    other = tree(await environment.restored("two"))
    assert other == tree(workspace)
    assert b"root:" not in b"".join(item[3] for item in other.values() if item[0] == "file")  # type: ignore[misc]


@pytest.mark.slow
async def test_a_single_file_can_be_read_from_a_checkpoint(environment: Environment) -> None:
    workspace, link = await environment.node("one")
    content = random.Random(6).randbytes(MAX_OBJECT + 12_345)
    (workspace / "a" / "b").mkdir(parents=True)
    (workspace / "a" / "b" / "large").write_bytes(content)
    for number in range(3000):
        (workspace / "a" / f"{number}").write_text(str(number))
    await environment.checkpoints.take(SESSION, link)

    entry = await environment.checkpoints.find(SESSION, "a/b/large")
    assert entry is not None
    pieces = [piece async for piece in environment.checkpoints.content(SESSION, entry)]
    assert b"".join(pieces) == content
    middle = [
        piece
        async for piece in environment.checkpoints.content(
            SESSION, entry, MAX_OBJECT - 10, MAX_OBJECT + 10
        )
    ]
    assert b"".join(middle) == content[MAX_OBJECT - 10 : MAX_OBJECT + 10]
    for name in ("a/0", "a/1234", "a/2999"):
        found = await environment.checkpoints.find(SESSION, name)
        assert found is not None
        (text,) = [piece async for piece in environment.checkpoints.content(SESSION, found)]
        assert text.decode() == name[2:]
    for name in ("a/absent", "absent", "z", "a/b/large/x"):
        assert await environment.checkpoints.find(SESSION, name) is None
    listed = [entry.path async for entry in environment.checkpoints.entries(SESSION)]
    assert len(listed) == 3003
    assert listed == sorted(listed, key=lambda path: path.split("/"))


async def test_a_removed_checkpoint_leaves_nothing(environment: Environment) -> None:
    workspace, link = await environment.node("one")
    (workspace / "file").write_text("x")
    await environment.checkpoints.take(SESSION, link)

    await environment.checkpoints.forget(SESSION)

    assert environment.objects() == {}
    assert await environment.checkpoints.get(SESSION) is None
    assert await environment.checkpoints.find(SESSION, "file") is None


# The manifest

_names = st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..")
)
_parts = st.lists(
    st.builds(Part, st.none(), st.just(0), st.integers(1, 2**50))
    | st.builds(
        Part, st.just("ab" * 32), st.integers(0, MAX_OBJECT // 2), st.integers(1, MAX_OBJECT // 2)
    ),
    max_size=3,
)


def _with_parts(entry: Entry, parts: list[Part]) -> Entry:
    if entry.kind != "f":
        return entry
    size = max(entry.size, sum(part.length for part in parts))
    return dataclasses.replace(entry, size=size, parts=tuple(parts))


_bare_entries = st.builds(
    Entry,
    path=st.lists(_names, min_size=1, max_size=3).map("/".join),
    kind=st.sampled_from("fdl"),
    mode=st.integers(0, 0o7777),
    size=st.integers(0, 2**50),
    modified=st.integers(-(2**62), 2**62),
    changed=st.integers(0, 2**62),
    inode=st.integers(0, 2**63),
    target=st.text(st.characters(exclude_characters="\0"), max_size=8),
)
_entries = st.builds(_with_parts, _bare_entries, _parts)


@given(st.lists(_entries, max_size=50))
@settings(deadline=None, max_examples=50)
async def test_pages_return_the_written_entries(entries: list[Entry]) -> None:
    writer, pages = PageWriter(), []
    for entry in entries:
        page = writer.add(entry)
        if page is not None:
            pages.append(page)
    last = writer.end()
    if last is not None:
        pages.append(last)
    assert [entry for _, page in pages for entry in read_page(page)] == entries


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.integers(0, 60),
    st.integers(0, 60),
)
async def test_a_span_equals_a_slice(lengths: list[int], start: int, end: int) -> None:
    content = bytes(range(sum(lengths)))
    parts, place = [], 0
    for length in lengths:
        parts.append(Part("object", place, length))
        place += length
    found = b"".join(
        content[part.offset : part.offset + part.length] for part in spans(parts, start, end)
    )
    assert found == content[start : max(start, min(end, len(content)))]


async def test_a_manifest_of_another_version_is_refused() -> None:
    manifest = Manifest("s", 1, "now", 0, 0, (("a", "1" * 64),), {"2" * 64: (1, 2)})
    assert read_manifest(manifest.encoded(), "s") == manifest
    other = {**json.loads(manifest.encoded()), "version": 99}
    with pytest.raises(PermanentError):
        read_manifest(json.dumps(other).encode(), "s")


# What user code can make large


@pytest.mark.slow
async def test_a_file_of_very_many_parts_is_restored_from_few_objects(
    environment: Environment,
) -> None:
    workspace, link = await environment.node("one")
    with (workspace / "sparse").open("wb") as file:
        for number in range(15_000):
            file.seek(number * 3 * 4096)
            file.write(b"%d" % number)
        file.truncate(1 << 30)
    with (workspace / "wide").open("wb") as file:
        # At the end of each of the places where a file is cut.
        for number in range(1, 300):
            file.seek(number * MAX_OBJECT - 4)
            file.write(b"here")

    await environment.checkpoints.take(SESSION, link)

    assert len(environment.objects()) < 30
    other = await environment.restored("two")
    for name in ("sparse", "wide"):
        same = await asyncio.create_subprocess_exec("cmp", workspace / name, other / name)
        assert await same.wait() == 0
        # Not the same: when the file system gives out its blocks is its own affair.
        assert (other / name).stat().st_blocks * 512 < 200 * MEGABYTE


async def test_a_file_with_too_many_parts_is_omitted_and_reported(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming_file, "MAX_PARTS", 100)
    workspace, link = await environment.node("one")
    with (workspace / "sparse").open("wb") as file:
        for number in range(200):
            file.seek(number * 3 * 4096)
            file.write(b"%d" % number)
    (workspace / "other").write_text("kept")

    await environment.checkpoints.take(SESSION, link)

    assert environment.manifest().cut
    assert tree(await environment.restored("two")) == {"other": tree(workspace)["other"]}


async def test_sizes_beyond_the_range_of_numbers_are_handled(environment: Environment) -> None:
    workspace, link = await environment.node("one")
    largest = 1 << 40
    with contextlib.suppress(OSError):
        for each in (41, 42, 43, 50, 60, 62):
            with (workspace / "probe").open("wb") as file:
                file.truncate(1 << each)
                largest = 1 << each
    (workspace / "probe").unlink()
    for number in range(4):
        with (workspace / f"{number}").open("wb") as file:
            file.truncate(largest)

    taken = await environment.checkpoints.take(SESSION, link)

    assert taken is not None
    assert taken.size == min(4 * largest, 2**63 - 1)


async def test_paths_longer_than_the_kernel_accepts_are_saved(environment: Environment) -> None:
    workspace, link = await environment.node("one")
    _down(workspace, "\udcff" * 250, 40, {"end": b"deep"})

    await environment.checkpoints.take(SESSION, link)

    assert not environment.manifest().cut
    other = await environment.restored("two")
    here = os.open(other, os.O_RDONLY)
    for _ in range(40):
        here = os.open("\udcff" * 250, os.O_RDONLY, dir_fd=here)
    assert os.read(os.open("end", os.O_RDONLY, dir_fd=here), 10) == b"deep"


@pytest.mark.slow
async def test_many_names_in_a_very_long_path_do_not_break_the_link(
    environment: Environment,
) -> None:
    workspace, link = await environment.node("one")
    _down(workspace, "\udcff" * 255, 60, {f"{number}": b"x" for number in range(2500)})
    _down(workspace, "d" * 255, 150, {f"{number}": b"x" for number in range(2500)})

    taken = await environment.checkpoints.take(SESSION, link)

    assert link.alive
    assert taken is not None
    assert taken.files == 2500
    assert environment.manifest().cut


def _down(top: Path, name: str, levels: int, files: dict[str, bytes]) -> None:
    """Step by step, as user code can."""
    here = os.open(top, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    for each, content in files.items():
        fd = os.open(each, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=here)
        os.write(fd, content)
        os.close(fd)
    os.close(here)
