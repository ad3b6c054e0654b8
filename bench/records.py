"""
`make bench-records`: what a long list of executions costs, on each database.

A million records in one session; then the first page, the deepest, and what one execution's two
commits cost beside them. The deepest page should cost what the first does. The servers are private
ones on loopback with the tests' settings (no fsync), so the commits flatter them; the pages do not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sqlite3
import tempfile
import time
from contextlib import ExitStack, asynccontextmanager, closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.servers.mariadb import MariaDB
from tests.servers.postgres import PostgreSQL

from atoll import ids
from atoll.model.execution import Execution, ExecutionStatus, Language, Outcome, Request
from atoll.model.invocation import STATUSES_OF, InvocationStatus
from atoll.settings import DatabaseSettings, SqliteSettings
from atoll.stores.sql.executions import MAPPER
from atoll.stores.sql.json_codec import micros
from atoll.stores.sql.metadata import metadata
from atoll.stores.sql.paging import make_cursor
from atoll.stores.sql.schema import Schema
from atoll.stores.sql.server.connect import make_engine
from atoll.stores.sql.store import SqlStore
from bench.measure import Samples, samples
from bench.report import Report, parser

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

KINDS = ("sqlite", "mariadb", "postgresql")
ROWS = 1_000_000
BATCH = 2000
PAGES = 200
COMMITS = 500
FIRST = datetime(2026, 1, 1, tzinfo=UTC)
SESSION = "sess_of_a_million"
SQLITE, DATABASE = SqliteSettings(), DatabaseSettings()


def execution(number: int, session: str = SESSION) -> Execution:
    at = FIRST + timedelta(milliseconds=number)
    id = ids.execution_id(at)
    return Execution(
        id=id,
        invocation_id=ids.invocation_id(id),
        session_id=session,
        request=Request(code="print('hello')\n" * 20, language=Language.PYTHON),
        status=ExecutionStatus.FAILED if number % 100 == 0 else ExecutionStatus.COMPLETED,
        created_at=at,
        completed_at=at,
        outcome=Outcome(ExecutionStatus.COMPLETED, None, 0, stdout=b"hello\n" * 20),
    )


def batches(count: int) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, count, BATCH):
        yield [MAPPER.row(execution(number)) for number in range(start, min(start + BATCH, count))]


def fill_file(path: Path, count: int) -> None:
    with closing(sqlite3.connect(path)) as connection:
        for rows in batches(count):
            names = ", ".join(rows[0])
            values = ", ".join(f":{name}" for name in rows[0])
            connection.executemany(f"INSERT INTO executions ({names}) VALUES ({values})", rows)
        connection.commit()


async def fill_server(url: str, count: int) -> None:
    engine = make_engine([url], DATABASE)
    try:
        for rows in batches(count):
            async with engine.begin() as connection:
                await connection.execute(metadata.tables["executions"].insert(), rows)
    finally:
        await engine.dispose()


@asynccontextmanager
async def filled(kind: str, place: Path, count: int) -> AsyncIterator[SqlStore]:
    """A store with so many executions, on a database of this kind."""
    with ExitStack() as stack:
        if kind == "sqlite":
            url = f"sqlite:///{place / 'atoll.db'}"
        else:
            server = {"mariadb": MariaDB, "postgresql": PostgreSQL}[kind](place)
            url = stack.enter_context(server).url
        await Schema([url], sqlite=SQLITE, database=DATABASE).upgrade()
        start = time.perf_counter()
        if kind == "sqlite":
            await asyncio.to_thread(fill_file, place / "atoll.db", count)
        else:
            await fill_server(url, count)
        print(f"written in {time.perf_counter() - start:.0f} s", flush=True)
        store = SqlStore([url], sqlite=SQLITE, database=DATABASE)
        await store.open()
        try:
            yield store
        finally:
            await store.close()


async def timed(name: str, work: Callable[[], Awaitable[object]], count: int) -> Samples:
    for _ in range(5):
        await work()
    values = []
    for _ in range(count):
        start = time.perf_counter()
        await work()
        values.append((time.perf_counter() - start) * 1000)
    return samples(name, values)


async def pages(report: Report, store: SqlStore) -> None:
    for name, where, last_number in (
        ("all", {}, 49),
        ("of the session", {"session_id": SESSION}, 49),
        (
            "failed ones of the session",
            {"session_id": SESSION, "status": ExecutionStatus.FAILED},
            49 * 100,
        ),
    ):
        cursor = make_cursor(micros(FIRST + timedelta(milliseconds=last_number)), "~")
        found = await store.executions.page(limit=50, **where)  # type: ignore[arg-type]
        last = await store.executions.page(limit=50, cursor=cursor, **where)  # type: ignore[arg-type]
        assert len(found.items) == 50
        assert len(last.items) == 50
        assert last.next_cursor is None
        first = await timed(
            f"{name}: page 1",
            lambda where=where: store.executions.page(limit=50, **where),  # type: ignore[misc]
            PAGES,
        )
        deepest = await timed(
            f"{name}: deepest page",
            lambda where=where, cursor=cursor: store.executions.page(
                limit=50, cursor=cursor, **where
            ),  # type: ignore[misc]
            PAGES,
        )
        report.add(deepest, report.add(first))
    cursor = make_cursor(micros(FIRST + timedelta(milliseconds=49 * 100)), "~")
    failed = STATUSES_OF[InvocationStatus.FAILED]
    for name, start in (("page 1", None), ("deepest page", cursor)):
        listed = await timed(
            f"failed invocations: {name}",
            lambda start=start: store.executions.latest(statuses=failed, cursor=start),  # type: ignore[misc]
            PAGES,
        )
        report.add(listed)


async def commits(report: Report, store: SqlStore) -> None:
    number = 0

    async def two() -> None:
        nonlocal number
        number += 1
        new = execution(number, "sess_new")
        await store.executions.add(
            dataclasses.replace(new, status=ExecutionStatus.PENDING, outcome=None)
        )
        await store.executions.save(new)

    report.add(await timed("an execution's two commits", two, COMMITS))


async def measure(report: Report, kind: str, count: int) -> None:
    report.section(f"{count} records in {kind}")
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as place:
        os.chmod(place, 0o755)  # PostgreSQL runs as another user.
        async with filled(kind, Path(place), count) as store:
            await pages(report, store)
            await commits(report, store)


def main() -> None:
    options = parser("records", __doc__)
    options.add_argument("rows", type=int, nargs="?", default=ROWS)
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    given = options.parse_args()
    with Report("records", given.json) as report:
        for kind in given.kinds:
            asyncio.run(measure(report, kind, given.rows))


if __name__ == "__main__":
    main()
