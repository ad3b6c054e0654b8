"""`atoll key …`: API keys of the server on this machine. Accesses its database, not the server."""

from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import output
from atoll.cli.options import DataDir, Json, command_group, settings
from atoll.errors import NotFound
from atoll.model.api_key import ApiKey, Scope

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path
    from typing import TypeVar

    from atoll.service.auth.service import ApiKeys

    T = TypeVar("T")

app = command_group("API keys of the server on this machine.")


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="Owner or purpose of the key.")],
    scope: Annotated[Scope, typer.Option(help="What the key allows.")] = Scope.FULL,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Create a key and print it. It cannot be shown again."""
    key, secret = _run(data_dir, lambda keys: keys.create(name, scope))
    output.as_json({**_shown(key), "key": secret}) if json else output.line(secret)


@app.command("list")
def list_(data_dir: DataDir = None, json: Json = False) -> None:
    """List keys."""
    keys = _run(data_dir, lambda keys: keys.list())
    if json:
        output.as_json([_shown(key) for key in keys])
        return
    output.columns({"KEY": "id", "NAME": "name", "SCOPE": "scope", "AGE": "created_at"})(keys)


@app.command()
def rm(
    key_id: Annotated[str, typer.Argument(metavar="KEY", help="Key id, not the key itself.")],
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Revoke a key."""
    if not _run(data_dir, lambda keys: keys.remove(key_id)):
        raise NotFound(f"Key {key_id} does not exist.", code="key_not_found")
    output.result({"removed": [key_id]}, output.removed, json=json)


def _shown(key: ApiKey) -> dict[str, object]:
    """The key's fields without the digest."""
    return {"id": key.id, "name": key.name, "scope": key.scope, "created_at": key.created_at}


def _run(data_dir: "Path | None", work: "Callable[[ApiKeys], Awaitable[T]]") -> "T":
    chosen = settings(data_dir=data_dir)
    import asyncio

    from atoll.app import api_keys

    async def run() -> "T":
        async with api_keys.keys(chosen) as keys:
            return await work(keys)

    return asyncio.run(run())
