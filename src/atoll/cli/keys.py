"""`atoll key …`: API keys of the server on this machine. Accesses its database, not the server."""

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
    help="API keys of the server on this machine.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Owner or purpose of the key.")],
    scope: Annotated[Scope, typer.Option(help="What the key allows.")] = Scope.FULL,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Create a key and print it. It cannot be shown again."""
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
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="Key id, not the key itself.")],
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Revoke a key."""
    chosen = settings(data_dir=data_dir)

    async def removed() -> bool:
        from atoll.app import api_keys

        async with api_keys.keys(chosen) as keys:
            return await keys.remove(key_id)

    if not _run(removed()):
        raise NotFound(f"Key {key_id} does not exist.", code="key_not_found")
    output.result({"removed": [key_id]}, output.removed, json=json)


def _shown(key: Key) -> dict[str, object]:
    """The key's fields without the digest."""
    return {"id": key.id, "name": key.name, "scope": key.scope, "created_at": key.created_at}


def _run(work: "Coroutine[Any, Any, T]") -> "T":
    import asyncio

    return asyncio.run(work)
