"""Small writes are committed by the event loop, and by the thread when it must not wait."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from atoll.errors import VersionConflict
from atoll.settings import SqliteSettings
from atoll.stores.sql.sqlite.engine import SqliteEngine
from atoll.stores.sql.sqlite.group_commit import CHECKPOINT_PAGES, MAX_IN_A_ROW
from atoll.stores.sql.writes import Change

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.stores.sql.engine import Connection

pytestmark = [pytest.mark.anyio, pytest.mark.quick]

INSERT = "INSERT INTO notes (id, version, writer) VALUES (:id, :version, writer())"
UPDATE = "UPDATE notes SET version = :version + 1 WHERE id = :id AND version = :version"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.db"


@pytest.fixture
async def engine(path: Path) -> AsyncIterator[SqliteEngine]:
    engine = SqliteEngine(str(path), SqliteSettings())
    await engine.open()
    await engine.write(prepare)
    yield engine
    await engine.close()


def prepare(connection: Connection) -> None:
    assert isinstance(connection, sqlite3.Connection)
    connection.create_function("writer", 0, lambda: threading.current_thread().name)
    connection.execute("CREATE TABLE notes (id TEXT PRIMARY KEY, version INTEGER, writer TEXT)")


def add(note: str) -> Change:
    return Change(INSERT, {"id": note, "version": 1}, "Note")


def stored(path: Path) -> dict[str, str]:
    """What another process reads: the notes, and which thread has written each."""
    with closing(sqlite3.connect(path)) as connection:
        return dict(connection.execute("SELECT id, writer FROM notes"))


async def test_a_small_write_is_committed_by_the_event_loop(
    engine: SqliteEngine, path: Path
) -> None:
    await engine.write(add("a"))

    assert stored(path) == {"a": "MainThread"}


async def test_the_writes_of_a_turn_share_a_commit_and_a_refused_one_affects_no_other(
    engine: SqliteEngine, path: Path
) -> None:
    await engine.write(add("a"))
    changes = [add("b"), Change(UPDATE, {"id": "a", "version": 7}, "Note"), add("c")]

    results = await asyncio.gather(*map(engine.write, changes), return_exceptions=True)

    assert [type(result) for result in results] == [type(None), VersionConflict, type(None)]
    assert stored(path).keys() == {"a", "b", "c"}


async def test_the_event_loop_does_not_wait_for_another_process(
    engine: SqliteEngine, path: Path
) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        write = asyncio.ensure_future(engine.write(add("a")))
        turns = 0
        while turns < 100:
            await asyncio.sleep(0)
            turns += 1
        assert not write.done()
        other.execute("COMMIT")
        await write

    assert stored(path) == {"a": "atoll-sql-writer"}


async def test_writes_happen_in_the_order_of_their_requests(engine: SqliteEngine) -> None:
    def count(connection: Connection) -> int:
        row = connection.execute("SELECT count(*) AS n FROM notes").fetchone()
        assert row is not None
        return int(row["n"])

    found = await asyncio.gather(
        engine.write(add("a")), engine.write(count), engine.write(add("b")), engine.write(count)
    )

    assert (found[1], found[3]) == (1, 2)


async def test_what_was_requested_before_the_end_is_stored(path: Path) -> None:
    engine = SqliteEngine(str(path), SqliteSettings())
    await engine.open()
    await engine.write(prepare)
    write = engine.write(add("a"))
    await engine.close()

    await write
    assert stored(path).keys() == {"a"}


async def test_the_log_stays_bounded(engine: SqliteEngine, path: Path) -> None:
    row = {"id": "", "version": 1}
    for number in range(20):
        text = f"{number}{'x' * 3_000_000}"
        await engine.write(Change(INSERT, row | {"id": text}, "Note"))
    for number in range(MAX_IN_A_ROW + 1):
        await engine.write(add(str(number)))
    # The commit that finds it so long moves its pages; from then on it starts anew.
    size = path.with_name("a.db-wal").stat().st_size

    for number in range(4 * MAX_IN_A_ROW):
        await engine.write(add(f"more {number}"))

    assert size > CHECKPOINT_PAGES * 4096
    assert path.with_name("a.db-wal").stat().st_size == size


@pytest.mark.parametrize("changed", [{"synchronous": "FULL"}, {"journal_mode": "DELETE"}])
async def test_commits_that_wait_for_the_disk_are_left_to_the_thread(
    path: Path, changed: dict[str, str]
) -> None:
    engine = SqliteEngine(str(path), SqliteSettings(**changed))
    await engine.open()
    await engine.write(prepare)
    await engine.write(add("a"))
    await engine.close()

    assert stored(path) == {"a": "atoll-sql-writer"}
