"""`atoll key …`: the keys of the server whose data is on this machine. No server is asked."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import output
from atoll.cli.options import DataDir, Json, settings
from atoll.errors import NotFound
from atoll.model.key import Key, Scope

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import TypeVar

    T = TypeVar("T")

app = typer.Typer(
    help="Keys of the server on this machine.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Whose it is, or what for.")],
    scope: Annotated[Scope, typer.Option(help="What it allows.")] = Scope.FULL,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Make a key and print it; it cannot be shown again."""
    chosen = settings(data_dir=data_dir)

    async def made() -> tuple[Key, str]:
        from atoll.app import api_keys

        async with api_keys.keys(chosen) as keys:
            return await keys.create(name, scope)

    key, secret = _run(made())
    output.as_json({**_shown(key), "key": secret}) if json else output.line(secret)


@app.command("list")
def list_(data_dir: DataDir = None, json: Json = False) -> None:
    """List keys."""
    chosen = settings(data_dir=data_dir)

    async def found() -> list[Key]:
        from atoll.app import api_keys

        async with api_keys.keys(chosen) as keys:
            return await keys.list()

    keys = _run(found())
    if json:
        output.as_json([_shown(key) for key in keys])
        return
    rows = [(key.id, key.name, key.scope, output.age(key.created_at)) for key in keys]
    output.table(("KEY", "NAME", "SCOPE", "AGE"), rows)


@app.command()
def rm(
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="Its id, not the key itself.")],
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Remove a key: it opens nothing any more."""
    chosen = settings(data_dir=data_dir)

    async def removed() -> bool:
        from atoll.app import api_keys

        async with api_keys.keys(chosen) as keys:
            return await keys.remove(key_id)

    if not _run(removed()):
        raise NotFound(f"There is no key {key_id}.", code="key_not_found")
    output.removed([key_id], json=json)


def _shown(key: Key) -> dict[str, object]:
    """All of it but the digest."""
    return {"id": key.id, "name": key.name, "scope": key.scope, "created_at": key.created_at}


def _run(work: "Coroutine[Any, Any, T]") -> "T":
    import asyncio

    return asyncio.run(work)
