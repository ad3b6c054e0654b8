"""Migrations upgrade and downgrade every database, also after interruptions."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from atoll.errors import AtollError, InvalidRequest, PermanentError, TemporaryError
from atoll.settings import DatabaseSettings, SqliteSettings
from atoll.stores.sql import migrations
from atoll.stores.sql.dsn import Kind
from atoll.stores.sql.metadata import metadata
from atoll.stores.sql.revisions import HEAD, REVISIONS, SchemaState, revision_of, schema_state
from atoll.stores.sql.schema import Schema
from atoll.stores.sql.server.connect import make_engine
from atoll.stores.sql.store import SqlStore
from tests.servers import free_port
from tests.servers.postgres import PostgreSQL
from tests.servers.process import DatabaseServer

from .store_entities import (
    completed,
    make_execution,
    make_instance,
    make_key,
    make_session,
    make_template,
)

pytestmark = pytest.mark.anyio

T = TypeVar("T")
Description = dict[str, str]

SERVERS = {Kind.MARIADB: "mariadb", Kind.POSTGRESQL: "postgresql"}
TABLES = set(metadata.tables)


class Database:
    """An empty one. Its schema is what users have, its connections are the test's own."""

    def __init__(self, url: str, another: Callable[[], str]) -> None:
        self.url = url
        self.another = another
        self.schema = Schema([url], sqlite=SqliteSettings(), database=DatabaseSettings())
        self.kind = self.schema.kind

    async def run(self, work: Callable[[Connection], T]) -> T:
        if self.kind is Kind.SQLITE:
            engine = sa.create_engine(self.url)
            try:
                with engine.begin() as connection:
                    return work(connection)
            finally:
                engine.dispose()
        server = make_engine([self.url], DatabaseSettings())
        try:
            async with server.begin() as held:
                return await held.run_sync(work)
        finally:
            await server.dispose()

    async def describe(self) -> Description:
        """Description of its tables, except the one with the revision."""
        found = await self.run(_DESCRIBE[self.kind])
        return {name: words for name, words in found.items() if "alembic_version" not in name}


def _describe_sqlite(connection: Connection) -> Description:
    rows = connection.execute(text("SELECT name, coalesce(sql, '') FROM sqlite_master"))
    return {name: "".join(sql.split()) for name, sql in rows}


def _describe_mariadb(connection: Connection) -> Description:
    names = connection.execute(text("SHOW TABLES")).scalars().all()
    created = {name: connection.execute(text(f"SHOW CREATE TABLE {name}")) for name in names}
    # In any order, which differs between indexes that were made by different hands.
    return {
        name: "\n".join(sorted(line.rstrip(",") for line in found.one()[1].splitlines()))
        for name, found in created.items()
    }


def _describe_postgresql(connection: Connection) -> Description:
    columns = connection.execute(
        text(
            "SELECT table_name || '.' || column_name, concat_ws(' ', data_type,"
            " character_maximum_length, numeric_precision, collation_name, is_nullable,"
            " column_default) FROM information_schema.columns WHERE table_schema = 'public'"
        )
    )
    indexes = connection.execute(
        text("SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'")
    )
    return {name: words for rows in (columns, indexes) for name, words in rows}


_DESCRIBE = {
    Kind.SQLITE: _describe_sqlite,
    Kind.MARIADB: _describe_mariadb,
    Kind.POSTGRESQL: _describe_postgresql,
}


@pytest.fixture(params=[pytest.param(Kind.SQLITE, marks=pytest.mark.quick), *SERVERS])
def database(request: pytest.FixtureRequest, path: Path) -> Database:
    if request.param is Kind.SQLITE:
        return Database(f"sqlite:///{path}", lambda: f"sqlite:///{path}-2")
    return _on(request, request.param)


@pytest.fixture(params=list(SERVERS))
def on_server(request: pytest.FixtureRequest) -> Database:
    return _on(request, request.param)


def _on(request: pytest.FixtureRequest, kind: Kind) -> Database:
    server: DatabaseServer = request.getfixturevalue(SERVERS[kind])
    return Database(server.new_database(), server.new_database)


@pytest.fixture
async def engine(on_server: Database) -> AsyncIterator[AsyncEngine]:
    engine = make_engine([on_server.url], DatabaseSettings())
    yield engine
    await engine.dispose()


async def test_the_migrations_lead_to_the_tables(database: Database) -> None:
    await database.schema.upgrade()

    def difference(connection: Connection) -> Any:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return compare_metadata(context, metadata)

    assert await database.run(difference) == []
    assert await database.run(revision_of) == await database.schema.revision() == HEAD


async def test_a_server_gets_exactly_the_tables(on_server: Database) -> None:
    """Collations too, which alembic does not compare."""
    await on_server.schema.upgrade()
    made = Database(on_server.another(), on_server.another)
    await made.run(metadata.create_all)

    assert await on_server.describe() == await made.describe()


async def test_every_downgrade_undoes_its_upgrade(database: Database) -> None:
    steps: list[tuple[str | None, Description]] = [(None, await database.describe())]
    for revision in REVISIONS:
        await database.schema.upgrade(revision)
        steps.append((revision, await database.describe()))
        assert await database.schema.revision() == revision

    for lower, before in reversed(steps[:-1]):
        await database.schema.downgrade(lower or "base")
        assert await database.schema.revision() == lower
        assert await database.describe() == before

    left = await database.run(lambda held: sa.inspect(held).get_table_names())
    assert left == ["alembic_version"]
    await database.schema.upgrade()
    assert await database.describe() == steps[-1][1]


@pytest.mark.parametrize("older", REVISIONS[:-1])
async def test_data_of_an_older_version_survives_the_migration(
    database: Database, tmp_path: Path, older: str
) -> None:
    session, template, key, instance = make_session(), make_template(), make_key(), make_instance()
    execution = completed(make_execution(session_id=session.id), stdout=b"\0\xff")
    # The rows as the store writes them; older versions had fewer columns.
    elsewhere = Database(f"sqlite:///{tmp_path}/written.db", str)
    store = SqlStore([elsewhere.url], sqlite=SqliteSettings(), database=DatabaseSettings())
    await store.open()
    await store.sessions.add(session)
    await store.templates.add(template)
    await store.api_keys.add(key)
    await store.instances.add(instance)
    await store.executions.add(make_execution(session_id=session.id))
    await store.executions.add(execution)
    await store.close()
    await elsewhere.schema.downgrade(older)
    await database.schema.upgrade(older)
    tables = {name: rows for name, rows in (await elsewhere.run(_rows)).items() if rows}
    assert sorted(tables) == ["api_keys", "executions", "instances", "sessions", "templates"]

    def write(connection: Connection) -> None:
        found = sa.MetaData()
        found.reflect(connection)
        for name, rows in tables.items():
            connection.execute(found.tables[name].insert(), rows)

    await database.run(write)
    await database.schema.upgrade()

    now = await database.run(_rows)
    assert {name: rows for name, rows in now.items() if rows} == {
        name: [_with_new_columns(name, row) for row in rows] for name, rows in tables.items()
    }
    upgraded = SqlStore([database.url], sqlite=SqliteSettings(), database=DatabaseSettings())
    await upgraded.open()
    try:
        assert await upgraded.sessions.get(session.id) == session
        assert await upgraded.templates.get(template.id) == template
        assert await upgraded.api_keys.all() == [key]
        assert await upgraded.instances.all() == [instance]
        assert await upgraded.executions.get(execution.id) == execution
    finally:
        await upgraded.close()


def _rows(connection: Connection) -> dict[str, list[dict[str, Any]]]:
    found = sa.MetaData()
    found.reflect(connection)
    return {
        table.name: [
            dict(row) for row in connection.execute(table.select().order_by("id")).mappings()
        ]
        for table in found.tables.values()
        if "id" in table.columns
    }


def _with_new_columns(name: str, row: dict[str, Any]) -> dict[str, Any]:
    found = {
        column.name: row.get(column.name, NOT_NULL.get((name, column.name)))
        for column in metadata.tables[name].columns
    }
    if name == "sessions":
        # It runs, and the time it had is the time it has.
        found["timer_at"] = row["expires_at"]
    return found


NOT_NULL = {
    ("sessions", "capacity"): 1,
    ("sessions", "template_version"): 1,
    ("sessions", "workspace_mode"): "sync",
    ("sessions", "durability"): "background",
    ("sessions", "auto_start"): 1,
    ("sessions", "failures"): 0,
    ("templates", "number"): 1,
    ("templates", "status"): "ready",
    ("executions", "ordinal"): 1,
    ("executions", "superseded"): 0,
}
"""What a row of an older version has in a column that it did not know."""


async def test_concurrent_upgrades_take_turns(database: Database) -> None:
    """As with replicas that start together: each in its own process."""
    script = (
        "import asyncio, sys\n"
        "from atoll.settings import DatabaseSettings, SqliteSettings\n"
        "from atoll.stores.sql.schema import Schema\n"
        "settings = {'sqlite': SqliteSettings(), 'database': DatabaseSettings()}\n"
        "schema = Schema([sys.argv[1]], **settings)\n"
        "asyncio.run(schema.upgrade())\n"
    )
    command = [sys.executable, "-c", script, database.url]

    async with asyncio.timeout(60):
        several = [
            await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE) for _ in range(3)
        ]
        output = [await process.communicate() for process in several]

    assert [process.returncode for process in several] == [0] * 3, output
    assert await database.schema.revision() == HEAD


@pytest.mark.parametrize("change", [migrations.upgrade, migrations.downgrade])
async def test_an_interrupted_migration_is_finished_by_the_next(
    change: Callable[[Connection, str], None], on_server: Database
) -> None:
    up = change is migrations.upgrade
    target = "head" if up else "base"
    whole = Database(on_server.another(), on_server.another)
    await whole.schema.upgrade()
    wanted = await whole.describe() if up else {}
    database = Database(on_server.another(), on_server.another)
    if not up:
        await database.schema.upgrade()

    # Each run is interrupted at the first statement that gets further than the run before.
    interruptions, at, before = 0, 1, await _state(database)
    while await _interrupted(database, change, target, at=at) == at:
        interruptions += 1
        after = await _state(database)
        if database.kind is Kind.POSTGRESQL:
            # A run is a transaction: one place is like another.
            assert after == before
            at += 20
        else:
            at, before = (at + 1, before) if after == before else (2, after)
    assert interruptions > 3
    assert await database.describe() == wanted
    assert await database.schema.revision() == (HEAD if up else None)


async def _state(database: Database) -> tuple[Description, str | None]:
    return await database.describe(), await database.schema.revision()


class Interrupted(Exception):
    pass


async def _interrupted(
    database: Database,
    change: Callable[[Connection, str], None],
    revision: str,
    *,
    at: int,
) -> int:
    """Run it up to statement `at` of those that change the database; return how many there were."""
    engine = make_engine([database.url], DatabaseSettings())
    count = 0

    def count_down(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        nonlocal count
        if statement.split()[0] in ("CREATE", "DROP", "ALTER", "INSERT", "UPDATE", "DELETE"):
            count += 1
            if count == at:
                raise Interrupted

    event.listen(engine.sync_engine, "before_cursor_execute", count_down)
    try:
        async with engine.connect() as connection:
            await connection.run_sync(change, revision)
    except Interrupted:
        pass
    finally:
        await engine.dispose()
    return count


async def test_a_foreign_table_is_not_changed(database: Database) -> None:
    await database.run(lambda held: held.execute(text("CREATE TABLE sessions (mine INTEGER)")))
    before = await database.describe()

    with pytest.raises(AtollError, match="sessions") as caught:
        await database.schema.upgrade()

    assert (
        caught.value.code
        == {
            Kind.SQLITE: "database_unavailable",
            Kind.MARIADB: "schema_conflict",
            Kind.POSTGRESQL: "upgrade_failed",
        }[database.kind]
    )
    after = await database.describe()
    assert after["sessions.mine" if database.kind is Kind.POSTGRESQL else "sessions"]
    # MariaDB keeps the completed part, and continues from there without the foreign table.
    assert database.kind is Kind.MARIADB or after == before
    await database.run(lambda held: held.execute(text("DROP TABLE sessions")))
    await database.schema.upgrade()
    assert await database.schema.revision() == HEAD


@pytest.mark.parametrize("revision", ["0000", "nonsense", "+9"])
async def test_an_unknown_revision_is_refused(database: Database, revision: str) -> None:
    with pytest.raises(InvalidRequest, match=f"to {re.escape(revision)}") as caught:
        await database.schema.upgrade(revision)
    assert caught.value.code == "unknown_revision"

    await database.schema.upgrade("0001")
    with pytest.raises(InvalidRequest, match="from 0001 to 0002") as caught:
        await database.schema.downgrade("0002")
    assert caught.value.code == "unknown_revision"


async def test_a_database_of_a_newer_version_is_not_changed(database: Database) -> None:
    await database.schema.upgrade()
    newer = text("UPDATE alembic_version SET version_num = '9999'")
    await database.run(lambda held: held.execute(newer))
    before = await database.describe()

    for change in (database.schema.upgrade(), database.schema.downgrade("base")):
        with pytest.raises(PermanentError, match="9999") as caught:
            await change
        assert caught.value.code == "database_unknown_version"

    assert await database.describe() == before
    assert schema_state(await database.schema.revision()) is SchemaState.UNKNOWN


async def test_waiting_too_long_for_another_migration_is_an_error(
    engine: AsyncEngine, on_server: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine.connect() as other:
        await other.execute(text(LOCKS[on_server.kind]))
        with monkeypatch.context() as patch:
            patch.setattr(migrations, "LOCK_TIMEOUT", 0.2)
            with pytest.raises(TemporaryError) as caught:
                await on_server.schema.upgrade()
        assert caught.value.code == "upgrade_running"
        await other.rollback()
        await other.invalidate()

    await on_server.schema.upgrade()
    assert await on_server.schema.revision() == HEAD


LOCKS = {
    Kind.MARIADB: f"SELECT GET_LOCK({migrations.MARIADB_LOCK}, 0)",
    Kind.POSTGRESQL: f"SELECT pg_advisory_xact_lock({migrations.POSTGRESQL_LOCK})",
}


async def test_the_error_names_a_timeout_in_the_url_that_is_too_short(
    postgresql: PostgreSQL,
) -> None:
    database = Database(postgresql.new_database(), postgresql.new_database)
    hasty = Database(f"{database.url}?command_timeout=2", postgresql.new_database)
    engine = make_engine([database.url], DatabaseSettings())
    try:
        async with engine.connect() as other:
            await other.execute(text(LOCKS[Kind.POSTGRESQL]))
            with pytest.raises(PermanentError, match="command_timeout") as caught:
                await hasty.schema.upgrade()
            assert caught.value.code == "upgrade_failed"
    finally:
        await engine.dispose()


async def test_the_error_names_an_unreachable_server() -> None:
    nowhere = Database(f"postgresql://atoll@127.0.0.1:{free_port()}/atoll", str)

    for work in (nowhere.schema.revision(), nowhere.schema.upgrade()):
        with pytest.raises(TemporaryError, match=r"127\.0\.0\.1") as caught:
            await work
        assert caught.value.code == "database_unavailable"
