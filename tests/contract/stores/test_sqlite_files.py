"""What SQLite adds to the contract: files, other processes, crashes and full disks."""

from __future__ import annotations

import asyncio
import resource
import signal
import sqlite3
import stat
import subprocess
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from atoll.errors import InvalidRequest, PermanentError, TemporaryError
from atoll.model.execution import Request
from atoll.settings import DatabaseSettings, SqliteSettings
from atoll.stores.sql.paging import Query, page_of
from atoll.stores.sql.revisions import ensure_schema
from atoll.stores.sql.store import SqlStore

from .store_entities import make_execution, make_session, walk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .store_entities import OpenFile

pytestmark = [pytest.mark.anyio, pytest.mark.quick]

CHILD = """
import asyncio, os, signal, sys
from store_entities import PATIENT, make_execution
from atoll.settings import DatabaseSettings
from atoll.stores.sql.store import SqlStore

async def main(path, name, count, end):
    urls = [f"sqlite:///{path}"]
    store = SqlStore(urls, sqlite=PATIENT, database=DatabaseSettings())
    print("ready", flush=True)
    sys.stdin.readline()
    await store.open()
    ids = iter(range(int(count)))
    async def add():
        for n in ids:
            await store.executions.add(make_execution(id=f"{name}_{n}"))
    await asyncio.gather(*(add() for _ in range(4)))
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


def sqlite(url: str) -> SqlStore:
    return SqlStore([url], sqlite=SqliteSettings(), database=DatabaseSettings())


class Child:
    """Another process that adds `count` executions on request."""

    def __init__(self, path: Path, name: str, count: int, end: str = "closed") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path), name, str(count), end],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=__file__.rpartition("/")[0],
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def wait(self) -> tuple[int, str]:
        _, errors = self._process.communicate(timeout=60)
        return self._process.returncode, errors


@pytest.fixture
def file_size_limit() -> Iterator[None]:
    """No file can grow beyond 1 MiB, which a write meets as it meets a broken disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_only_the_owner_can_read_a_new_database(path: Path, open_file: OpenFile) -> None:
    store = await open_file()
    await store.sessions.add(make_session())

    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}

    assert modes == {"atoll.db": 0o600, "atoll.db-wal": 0o600, "atoll.db-shm": 0o600}


async def test_written_rows_exist_after_reopening(open_file: OpenFile) -> None:
    execution = make_execution()
    first = await open_file()
    await first.executions.add(execution)
    await first.close()

    second = await open_file()

    assert await second.executions.get(execution.id) == execution


async def test_a_closed_store_can_be_opened_again(open_file: OpenFile) -> None:
    store = await open_file()
    await store.close()

    await store.open()

    await store.executions.add(make_execution())


async def test_a_process_killed_right_after_add_returned_loses_nothing(
    path: Path, open_file: OpenFile
) -> None:
    child = await asyncio.to_thread(Child, path, "killed", 20, "killed")
    child.go()
    code, _ = await asyncio.to_thread(child.wait)
    assert code == -signal.SIGKILL

    store = await open_file()

    assert len(await walk(store.executions.page, 100)) == 20


async def test_processes_that_open_a_new_file_concurrently_can_all_write(
    path: Path, open_file: OpenFile
) -> None:
    names = [f"process{n}" for n in range(4)]
    children = await asyncio.gather(*(asyncio.to_thread(Child, path, name, 250) for name in names))
    for child in children:
        child.go()

    assert [await asyncio.to_thread(child.wait) for child in children] == [(0, "")] * 4

    store = await open_file()
    stored = {execution.id for execution in await walk(store.executions.page, 100)}
    assert stored == {f"{name}_{n}" for name in names for n in range(250)}


async def test_two_stores_in_one_process_share_a_file(open_file: OpenFile) -> None:
    first, second = await asyncio.gather(open_file(), open_file())
    executions = [make_execution() for _ in range(100)]

    await asyncio.gather(
        *map(first.executions.add, executions[::2]), *map(second.executions.add, executions[1::2])
    )

    for execution in executions:
        assert await first.executions.get(execution.id) == execution


async def test_a_write_blocked_too_long_by_another_process_can_be_retried(
    path: Path, open_file: OpenFile
) -> None:
    store = await open_file(SqliteSettings(busy_timeout=timedelta(0)))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    execution = make_execution()

    answers = await asyncio.gather(
        store.executions.add(execution), store.sessions.add(make_session()), return_exceptions=True
    )

    for answer in answers:
        assert isinstance(answer, TemporaryError)
        assert answer.code == "database_unavailable"
        assert "locked" in answer.message
    assert answers[0] is not answers[1]
    assert await store.executions.get(execution.id) is None
    other.close()
    await store.executions.add(execution)


@pytest.mark.usefixtures("file_size_limit")
async def test_a_full_disk_loses_only_refused_writes(
    open_file: OpenFile,
) -> None:
    store = await open_file()
    executions = [make_execution() for _ in range(10)]
    executions[5] = make_execution(request=Request(code="x" * 2**21))

    answers = await asyncio.gather(*map(store.executions.add, executions), return_exceptions=True)

    assert getattr(answers[5], "code", None) == "database_unavailable"
    for execution, answer in zip(executions, answers, strict=True):
        assert answer is None or isinstance(answer, TemporaryError)
        assert await store.executions.get(execution.id) == (None if answer else execution)
    await store.executions.add(make_execution())


async def test_the_error_names_a_missing_directory(tmp_path: Path) -> None:
    store = sqlite(f"sqlite:///{tmp_path}/missing/atoll.db")

    with pytest.raises(TemporaryError, match=r"missing/atoll\.db") as caught:
        await store.open()

    assert caught.value.code == "database_unavailable"
    await store.close()


async def test_a_path_that_is_not_a_file_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(TemporaryError, match="cannot be opened"):
        await sqlite(f"sqlite:///{tmp_path}").open()


async def test_a_file_that_is_not_a_database_is_reported_as_damaged(
    path: Path, open_file: OpenFile
) -> None:
    path.write_bytes(b"this is not a database" * 100)  # noqa: ASYNC240 no other task uses the loop

    with pytest.raises(PermanentError) as caught:
        await open_file()

    assert caught.value.code == "database_damaged"


@pytest.mark.parametrize(
    "url", ["", "atoll.db", "sqlite:", "sqlite:/atoll.db", "sqlite://host/x", "mysql:///x"]
)
def test_a_url_without_an_sqlite_database_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sqlite(url)

    assert caught.value.code == "bad_database_url"


async def test_two_databases_in_memory_are_separate() -> None:
    first, second = (sqlite("sqlite://") for _ in range(2))
    await first.open()
    await second.open()

    await first.sessions.add(make_session())

    assert (await second.sessions.page()).items == ()
    await first.close()
    await second.close()


@pytest.mark.parametrize(
    ("table", "where", "index"),
    [
        ("executions", {}, "executions_created"),
        ("executions", {"status": "failed"}, "executions_status"),
        ("executions", {"session_id": "s"}, "executions_session"),
        ("executions", {"session_id": "s", "status": "failed"}, "executions_session"),
        ("sessions", {}, "sessions_created"),
        ("sessions", {"status": "running"}, "sessions_status"),
        ("sessions", {"template_id": "t"}, "sessions_template"),
        ("templates", {}, "templates_created"),
    ],
)
@pytest.mark.parametrize("cursor", [None, "WzEsImlkIl0"], ids=["first page", "later page"])
def test_a_page_is_read_from_an_index_without_sorting(
    table: str, where: dict[str, str], index: str, cursor: str | None
) -> None:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    ensure_schema(connection)
    statements: list[str] = []
    connection.set_trace_callback(statements.append)

    page_of(Query(table, where), dict, cursor, 5)(connection)

    connection.set_trace_callback(None)
    plan = connection.execute(f"EXPLAIN QUERY PLAN {statements[0]}").fetchall()
    connection.close()
    assert len(plan) == 1
    assert f"USING INDEX {index}" in plan[0][3]
