"""`atoll db …`: the schema of the database that a server's settings name. No server is asked."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import output
from atoll.cli.options import DataDir, Json, settings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path
    from typing import TypeVar

    from atoll.settings import Settings
    from atoll.stores.sql.schema import Schema

    T = TypeVar("T")

app = typer.Typer(
    help="The schema of the server's database.", no_args_is_help=True, rich_markup_mode=None
)

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        help="The database; else ATOLL_DATABASE_URL or _URLS, else the data directory's own.",
        metavar="URL",
    ),
]


@app.command()
def upgrade(
    revision: Annotated[str, typer.Argument(help="Where to stop on the way up.")] = "head",
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """
    Bring the schema up to this version's, or up to a revision.

    Several may run at once: one does it and the others wait. One that was interrupted is finished
    by running it again. SQLite needs it never, being brought up by the server's start.
    """

    async def upgraded(schema: "Schema") -> tuple[str | None, str | None]:
        before = await schema.revision()
        await schema.upgrade(revision)
        return before, await schema.revision()

    _tell(_run(_settings(database_url, data_dir), upgraded), json)


@app.command()
def downgrade(
    revision: Annotated[str, typer.Argument(help='Where to go down to; "base" is empty.')],
    database_url: DatabaseUrl = None,
    data_dir: DataDir = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """
    Take the schema down to an older version's. Stop all servers before, and make a backup.

    What only the newer schema has a place for is lost, with "base" everything.
    """

    async def downgraded(schema: "Schema") -> tuple[str | None, str | None]:
        before = await schema.revision()
        if not yes:
            _ask(f"Take {schema.name} from {before or 'base'} down to {revision}, losing data?")
        await schema.downgrade(revision)
        return before, await schema.revision()

    _tell(_run(_settings(database_url, data_dir), downgraded, alone=True), json)


@app.command()
def current(database_url: DatabaseUrl = None, data_dir: DataDir = None, json: Json = False) -> None:
    """
    Say which revision the schema is at and which one this version wants.

    Ends with 0 when they are the same and with 1 when not.
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
        raise typer.Exit(1)


def _ask(question: str) -> None:
    """On stderr alone, which typer's own way of asking does not keep to."""
    typer.echo(f"{question} [y/N] ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Exit(1)


def _tell(change: tuple[str | None, str | None], json: bool) -> None:
    before, after = change
    if json:
        output.as_json({"before": before, "revision": after})
    elif before == after:
        output.line(f"at {after or 'base'} already")
    else:
        output.line(f"{before or 'base'} -> {after or 'base'}")


def _settings(database_url: str | None, data_dir: "Path | None") -> "Settings":
    # The option stands for both variables, of which only one may be set.
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
