"""`atoll volume …`."""

from typing import Annotated

import typer

from atoll.cli import output
from atoll.cli.options import ApiKey, Json, Url, connect

app = typer.Typer(
    help="Files that several sessions share.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def create(
    volume_id: Annotated[str, typer.Argument(metavar="VOLUME", help="Its name.")],
    size: Annotated[str | None, typer.Option(help='Of a local one, like "1Gi".')] = None,
    kind: Annotated[
        str | None, typer.Option(help="local or s3; else s3 where the server's blobs are.")
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Make an empty volume and print its name."""
    with connect(url, api_key) as atoll:
        volume = atoll.volumes.create(volume_id, size=size, kind=kind)
    output.as_json(volume) if json else output.line(volume.id)


@app.command("list")
def list_(url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """List volumes, newest first."""
    with connect(url, api_key) as atoll:
        volumes = list(atoll.volumes.list())
    if json:
        output.as_json(volumes)
        return
    output.table(
        ("VOLUME", "KIND", "SIZE", "NODE", "AGE"),
        [
            (volume.id, volume.kind, volume.size, volume.node_id, output.age(volume.created_at))
            for volume in volumes
        ],
    )


@app.command()
def delete(
    volume_id: Annotated[list[str], typer.Argument(metavar="VOLUME...")],
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Remove volumes that no session has, with all that is in them."""
    with connect(url, api_key) as atoll:
        for one in volume_id:
            atoll.volumes.delete(one)
    output.removed(volume_id, json=json)
