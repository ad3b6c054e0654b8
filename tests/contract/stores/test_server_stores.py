"""What a store on a server adds to the contract: replicas that race, plans, and the schema."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from atoll.errors import InvalidRequest, PermanentError, TemporaryError
from atoll.model.execution import ExecutionStatus
from atoll.model.idempotency_record import IdempotencyRecord
from atoll.settings import DatabaseSettings, SqliteSettings
from atoll.stores.sql.dsn import Kind, address
from atoll.stores.sql.json_codec import micros
from atoll.stores.sql.metadata import metadata
from atoll.stores.sql.paging import statement
from atoll.stores.sql.server.connect import make_engine
from atoll.stores.sql.server.engine import ServerEngine
from atoll.stores.sql.store import SqlStore

from .store_entities import NOW, make_execution, make_key, make_session

pytestmark = pytest.mark.anyio

ROWS = 4000
PAGE = 20
OF_INVOCATION = 3


@pytest.fixture
async def replicas(server_url: str, anyio_backend: str) -> AsyncIterator[list[SqlStore]]:
    async with AsyncExitStack() as stack:
        opened = []
        for _ in range(3):
            store = SqlStore([server_url], sqlite=SqliteSettings(), database=DatabaseSettings())
            stack.push_async_callback(store.close)
            await store.open()
            opened.append(store)
        yield opened


@pytest.fixture
async def engine(server_url: str, anyio_backend: str) -> AsyncIterator[AsyncEngine]:
    engine = make_engine([server_url], DatabaseSettings())
    yield engine
    await engine.dispose()


async def test_concurrent_replicas_agree_on_the_cluster_id(replicas: list[SqlStore]) -> None:
    answers = await asyncio.gather(*(store.cluster() for store in replicas for _ in range(5)))

    assert len(set(answers)) == 1


async def test_concurrent_replicas_agree_on_the_secret(replicas: list[SqlStore]) -> None:
    answers = await asyncio.gather(*(store.secret() for store in replicas for _ in range(5)))

    assert len(set(answers)) == 1
    assert len(answers[0]) == 64
    assert answers[0] != await replicas[0].cluster()


async def test_a_key_added_concurrently_by_replicas_exists_once(replicas: list[SqlStore]) -> None:
    keys = [make_key(digest=b"same".ljust(32)) for _ in range(15)]

    await asyncio.gather(
        *(replicas[n % len(replicas)].api_keys.add(key) for n, key in enumerate(keys))
    )

    assert len(await replicas[0].api_keys.all()) == 1


@pytest.mark.parametrize("expired", [False, True], ids=["new", "expired"])
async def test_one_of_several_concurrent_claims_of_a_request_succeeds(
    replicas: list[SqlStore], expired: bool
) -> None:
    def request(holder: str) -> IdempotencyRecord:
        return IdempotencyRecord(
            id="one", holder=holder, created_at=NOW, expires_at=NOW + timedelta(days=1)
        )

    if expired:
        old = IdempotencyRecord(
            id="one", holder="old", created_at=NOW - timedelta(days=2), expires_at=NOW
        )
        assert await replicas[0].idempotency_records.claim(old) is None

    answers = await asyncio.gather(
        *(store.idempotency_records.claim(request(f"{n}")) for n in range(5) for store in replicas)
    )

    assert answers.count(None) == 1
    assert len({answer.holder for answer in answers if answer}) == 1


async def test_ids_are_ordered_by_their_bytes(replicas: list[SqlStore]) -> None:
    ids = ["B", "a", "Z", "_", "-", "é", "e", "E", "a ", "a\t", "ａ", "𝄞", "\uffee"]
    for id in ids:
        await replicas[0].sessions.add(make_session(id=id))

    got = [session.id for session in await replicas[0].sessions.unfinished(limit=100)]
    page = [session.id for session in (await replicas[0].sessions.page(limit=100)).items]

    assert got == sorted(ids, key=str.encode)
    assert page == got[::-1]


@pytest.mark.parametrize("id", ["x" * 65, "é" * 65], ids=["too long", "too long in characters"])
async def test_an_id_that_is_too_long_is_refused_and_not_truncated(
    replicas: list[SqlStore], id: str
) -> None:
    with pytest.raises(InvalidRequest):
        await replicas[0].sessions.add(make_session(id=id))

    assert await replicas[0].sessions.unfinished(limit=100) == []


@asynccontextmanager
async def opened(url: str, **settings: Any) -> AsyncIterator[ServerEngine]:
    engine = ServerEngine([url], DatabaseSettings(**settings))
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


async def test_a_connection_is_reused(server_url: str) -> None:
    name = "pg_backend_pid()" if address(server_url).kind is Kind.POSTGRESQL else "connection_id()"

    def connection_id(connection: Any) -> Any:
        return connection.execute(f"SELECT {name} AS id").fetchone()["id"]

    async with opened(server_url, pool_size=1, max_overflow=0) as engine:
        seen = {await engine.read(connection_id) for _ in range(5)}
        seen |= {await engine.write(connection_id) for _ in range(5)}

    assert len(seen) == 1


async def test_a_read_cannot_write(server_url: str) -> None:
    insert = "INSERT INTO properties (name, value) VALUES ('a', 'b')"

    async with opened(server_url) as engine:
        await engine.read(lambda connection: connection.execute(insert).rowcount)
        left = await engine.read(lambda it: it.execute("SELECT * FROM properties").fetchall())

    assert left == []


async def test_waiting_too_long_for_a_connection_is_an_error(server_url: str) -> None:
    hasty = timedelta(seconds=0.1)
    taken, go_on = asyncio.Event(), asyncio.Event()

    def hold(_: Any) -> None:
        taken.set()
        sa.util.await_only(go_on.wait())

    async with opened(server_url, pool_size=1, max_overflow=0, pool_timeout=hasty) as engine:
        holding = asyncio.create_task(engine.read(hold))
        try:
            await asyncio.wait_for(taken.wait(), 60)
            with pytest.raises(TemporaryError, match="in use") as caught:
                await engine.read(lambda connection: connection.execute("SELECT 1").fetchone())
        finally:
            go_on.set()
            await holding

    assert caught.value.code == "database_unavailable"


@pytest.mark.parametrize(
    ("revision", "code"),
    [
        (None, "schema_missing"),
        ("0001", "schema_outdated"),
        ("9999", "database_unknown_version"),
    ],
)
@pytest.mark.parametrize("kind", ["mariadb", "postgresql"])
async def test_a_schema_of_another_version_is_not_opened(
    request: pytest.FixtureRequest, kind: str, revision: str | None, code: str
) -> None:
    url = request.getfixturevalue(kind).new_database()
    if revision is not None:
        engine = make_engine([url], DatabaseSettings())
        async with engine.begin() as connection:
            await connection.execute(sa.text("CREATE TABLE alembic_version (version_num TEXT)"))
            await connection.execute(sa.text(f"INSERT INTO alembic_version VALUES ('{revision}')"))
        await engine.dispose()
    store = SqlStore([url], sqlite=SqliteSettings(), database=DatabaseSettings())

    with pytest.raises(PermanentError, match="atoll db upgrade") as caught:
        await store.open()

    assert caught.value.code == code
    with pytest.raises(TemporaryError, match="not open"):
        await store.ping()


@pytest.mark.parametrize(
    "where",
    [
        {},
        {"status": "completed"},
        {"session_id": "sess_3"},
        {"session_id": "sess_3", "status": "completed"},
    ],
    ids=["all", "by status", "by session", "by both"],
)
async def test_a_page_costs_the_same_at_any_position(
    engine: AsyncEngine, where: dict[str, str]
) -> None:
    async with filled(engine) as (connection, count):
        start = {"after_time": micros(NOW) + ROWS // 2, "after_id": "x"}
        for values in (where, where | start):
            page = statement("executions", tuple(where), "after_id" in values)
            assert await count(connection, page, values | {"limit": PAGE}) <= PAGE + 2


@pytest.mark.parametrize(
    "more",
    [{}, {"session_id": "sess_3"}, {"status": "completed"}, {"session_id": "sess_3", "status": ""}],
    ids=["alone", "with session", "with status", "with both"],
)
async def test_a_page_of_an_invocation_reads_no_other_rows(
    engine: AsyncEngine, more: dict[str, str]
) -> None:
    where = {"invocation_id": "inv_3"} | more
    async with filled(engine) as (connection, count):
        for values in (where, where | {"after_time": 1, "after_id": "x"}):
            page = statement("executions", tuple(where), "after_id" in values)
            assert await count(connection, page, values | {"limit": PAGE}) <= OF_INVOCATION + 1


@asynccontextmanager
async def filled(
    engine: AsyncEngine,
) -> AsyncIterator[tuple[AsyncConnection, Callable[..., Awaitable[int]]]]:
    """A connection to a large table, and what counts the rows that a page of it reads."""
    async with engine.begin() as connection:
        await connection.execute(
            metadata.tables["executions"].insert(), [row(n) for n in range(ROWS)]
        )
    async with engine.connect() as connection:
        await connection.execution_options(isolation_level="AUTOCOMMIT")
        mariadb = engine.dialect.name != "postgresql"
        await connection.execute(sa.text(f"ANALYZE {'TABLE' if mariadb else ''} executions"))
        yield connection, rows_read_by_mariadb if mariadb else rows_read_by_postgresql


def row(n: int) -> dict[str, object]:
    return {
        "id": make_execution().id,
        "session_id": f"sess_{n % 40}",
        "invocation_id": f"inv_{n // OF_INVOCATION}",
        "ordinal": n % OF_INVOCATION,
        "status": ExecutionStatus.COMPLETED.value,
        "created_at": micros(NOW) + n,
        "retry_count": 0,
        "version": 1,
        "request": "x" * 300,
    }


async def rows_read_by_mariadb(
    connection: AsyncConnection, page: str, values: dict[str, Any]
) -> int:
    async def handled() -> int:
        rows = await connection.execute(
            sa.text("SHOW SESSION STATUS WHERE Variable_name LIKE 'Handler_read%'")
        )
        return sum(int(number) for name, number in rows if not name.endswith("rnd_next"))

    before = await handled()
    (await connection.execute(sa.text(page), values)).all()
    return await handled() - before


async def rows_read_by_postgresql(
    connection: AsyncConnection, page: str, values: dict[str, Any]
) -> int:
    explain = sa.text(f"EXPLAIN (ANALYZE, FORMAT JSON) {page}")
    plan = (await connection.execute(explain, values)).scalar_one()[0]["Plan"]
    while plan["Node Type"] in ("Limit", "Sort"):
        (plan,) = plan["Plans"]
    assert plan["Node Type"] in ("Index Scan", "Bitmap Heap Scan")
    return int(plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0))
