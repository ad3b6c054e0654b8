"""The schema's three tellings (tables, migrations, schema.sql) are one."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import StaticPool, create_engine

from atoll.errors import PermanentError
from atoll.stores.sql import migrations
from atoll.stores.sql.metadata import metadata
from atoll.stores.sql.paging import statement
from atoll.stores.sql.revisions import HEAD, ensure_schema, sqlite_revision

from .store_entities import make_session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from .store_entities import OpenFile

pytestmark = pytest.mark.quick


@pytest.fixture
def connection(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(
        sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    ) as connection:
        yield connection


def schema(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Names and statements, spaced alike."""
    rows = connection.execute("SELECT name, coalesce(sql, '') FROM sqlite_master ORDER BY name")
    return [(name, "".join(sql.split())) for name, sql in rows]


def test_a_new_database_has_the_schema_of_the_migrations(
    connection: sqlite3.Connection,
) -> None:
    migrations.upgrade(connection)
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as new:
        ensure_schema(new)

        assert schema(new) == schema(connection)
        assert sqlite_revision(new) == sqlite_revision(connection) == HEAD


def test_the_migrations_produce_the_tables(connection: sqlite3.Connection) -> None:
    migrations.upgrade(connection)

    engine = create_engine("sqlite://", creator=lambda: connection, poolclass=StaticPool)
    with engine.connect() as wrapped:
        context = MigrationContext.configure(wrapped, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []


def test_the_migrations_can_be_reverted_and_repeated(connection: sqlite3.Connection) -> None:
    migrations.upgrade(connection)
    before = schema(connection)

    migrations.downgrade(connection, "base")
    assert [name for name, _ in schema(connection) if "alembic" not in name] == []

    migrations.upgrade(connection)
    assert schema(connection) == before


def test_new_databases_have_the_newest_revision() -> None:
    config = Config()
    config.set_main_option("script_location", migrations.__path__[0])

    assert ScriptDirectory.from_config(config).get_heads() == [HEAD]


def test_a_failed_migration_changes_nothing(
    connection: sqlite3.Connection,
) -> None:
    connection.execute("CREATE TABLE sessions (mine TEXT)")
    before = schema(connection)

    with pytest.raises(Exception, match="sessions already exists"):
        migrations.upgrade(connection)
    with pytest.raises(sqlite3.OperationalError, match="sessions already exists"):
        ensure_schema(connection)

    assert schema(connection) == before


@pytest.mark.parametrize("continued", [False, True], ids=["first", "later"])
@pytest.mark.parametrize(
    ("table", "columns"),
    [
        ("sessions", ()),
        ("sessions", ("status",)),
        ("sessions", ("template_id",)),
        ("executions", ()),
        ("executions", ("status",)),
        ("executions", ("session_id",)),
        ("executions", ("session_id", "status")),
        ("executions", ("invocation_id",)),
        ("executions", ("invocation_id", "session_id")),
        ("executions", ("invocation_id", "status")),
        ("executions", ("invocation_id", "session_id", "status")),
    ],
)
def test_sqlite_uses_the_intended_index(
    connection: sqlite3.Connection, table: str, columns: tuple[str, ...], continued: bool
) -> None:
    ensure_schema(connection)
    page = statement(table, columns, continued)
    meant = page.partition("FORCE INDEX (")[2].partition(")")[0]
    values: dict[str, object] = {"after_time": 0, "after_id": "x", "limit": 9}

    plan = connection.execute(f"EXPLAIN QUERY PLAN {page}", values | dict.fromkeys(columns, "x"))

    ((*_, words),) = plan
    assert f" USING INDEX {meant} " in f"{words} "


@pytest.mark.anyio
async def test_an_older_database_is_migrated_when_it_is_opened(
    connection: sqlite3.Connection, open_file: OpenFile
) -> None:
    migrations.upgrade(connection)
    migrations.downgrade(connection, "base")

    stores = await asyncio.gather(open_file(), open_file())

    for store in stores:
        await store.sessions.add(make_session())
    assert sqlite_revision(connection) == HEAD


@pytest.mark.anyio
async def test_a_database_of_a_newer_version_is_not_changed(
    connection: sqlite3.Connection, open_file: OpenFile
) -> None:
    ensure_schema(connection)
    connection.execute("UPDATE alembic_version SET version_num = '9999'")

    with pytest.raises(PermanentError, match="9999") as caught:
        await open_file()

    assert caught.value.code == "database_unknown_version"
    assert sqlite_revision(connection) == "9999"


def test_opening_a_database_of_this_version_loads_neither_sqlalchemy_nor_alembic() -> None:
    script = (
        "import asyncio, sys\n"
        "from atoll.settings import DatabaseSettings, SqliteSettings\n"
        "from atoll.stores.sql.store import SqlStore\n"
        "async def main():\n"
        "    settings = {'sqlite': SqliteSettings(), 'database': DatabaseSettings()}\n"
        "    store = SqlStore(['sqlite://'], **settings)\n"
        "    await store.open()\n"
        "    await store.close()\n"
        "asyncio.run(main())\n"
        "print(sorted({'sqlalchemy', 'alembic'} & set(sys.modules)))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert done.stdout == "[]\n"
