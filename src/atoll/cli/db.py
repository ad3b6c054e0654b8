"""`atoll db …`: the schema of the server's database. Accesses the database, not the server."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import exit_codes, output
from atoll.cli.options import DataDir, Json, command_group, settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path
    from typing import TypeVar

    from atoll.settings import Settings
    from atoll.stores.sql.schema import Schema

    T = TypeVar("T")

app = command_group("The schema of the server's database.")

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        help="Database URL. Default: ATOLL_DATABASE_URL(S), then SQLite in the data directory.",
        metavar="URL",
    ),
]


@app.command()
def upgrade(
    revision: Annotated[str, typer.Argument(help="Revision to upgrade to.")] = "head",
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """
    Upgrade the schema to this version's, or to a revision.

    Concurrent upgrades are safe: one does the work, the others wait. Run an interrupted upgrade
    again to finish it. SQLite needs no upgrade command: the server upgrades it when it starts.
    """

    async def upgraded(schema: "Schema") -> tuple[str | None, str | None]:
        before = await schema.revision()
        await schema.upgrade(revision)
        return before, await schema.revision()

    _print_change(_run(_settings(database_url, data_dir), upgraded), json)


@app.command()
def downgrade(
    revision: Annotated[str, typer.Argument(help='Revision to downgrade to; "base" is empty.')],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    json: Json = False,
) -> None:
    """
    Downgrade the schema to an older revision. Stop all servers and make a backup first.

    Loses the data that the older schema cannot store; with "base", all data.
    """

    async def downgraded(schema: "Schema") -> tuple[str | None, str | None]:
        before = await schema.revision()
        if not yes:
            _ask(f"Downgrade {schema.name} from {before or 'base'} to {revision}, and lose data?")
        await schema.downgrade(revision)
        return before, await schema.revision()

    _print_change(_run(_settings(database_url, data_dir), downgraded, alone=True), json)


@app.command()
def current(database_url: DatabaseUrl = None, data_dir: DataDir = None, json: Json = False) -> None:
    """
    Show the schema's revision and the one that this version needs.

    Exits with 0 if they are equal, else with 1.
    """
    from atoll.stores.sql.revisions import HEAD, SchemaState, schema_state

    async def found(schema: "Schema") -> str | None:
        return await schema.revision()

    revision = _run(_settings(database_url, data_dir), found)
    state = schema_state(revision)
    if json:
        output.as_json({"revision": revision, "head": HEAD, "state": state})
    else:
        output.table(("REVISION", "HEAD", "STATE"), [(revision or "none", HEAD, state)])
    if state is not SchemaState.CURRENT:
        raise typer.Exit(exit_codes.FAILED)


def _ask(question: str) -> None:
    """Confirm on stderr; typer.confirm would write to stdout."""
    typer.echo(f"{question} [y/N] ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Exit(exit_codes.FAILED)


def _print_change(change: tuple[str | None, str | None], json: bool) -> None:
    before, after = change
    if json:
        output.as_json({"before": before, "revision": after})
    elif before == after:
        output.line(f"already at {after or 'base'}")
    else:
        output.line(f"{before or 'base'} -> {after or 'base'}")


def _settings(database_url: str | None, data_dir: "Path | None") -> "Settings":
    # The option overrides both variables; only one of them may be set.
    urls = None if database_url is None else ()
    return settings(database_url=database_url, database_urls=urls, data_dir=data_dir)


def _run(
    chosen: "Settings", work: "Callable[[Schema], Awaitable[T]]", *, alone: bool = False
) -> "T":
    import asyncio

    from atoll.app import stores

    async def run() -> "T":
        async with stores.schema(chosen, alone=alone) as schema:
            return await work(schema)

    return asyncio.run(run())
