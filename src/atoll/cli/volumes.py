"""`atoll volume …`."""

from typing import Annotated

import typer

from atoll.cli import output
from atoll.cli.options import ApiKey, Json, Url, connect

app = typer.Typer(
    help="Volumes: files that several sessions share.", no_args_is_help=True, rich_markup_mode=None
)


@app.command()
def create(
    volume_id: Annotated[str, typer.Argument(metavar="VOLUME", help="Volume name.")],
    size: Annotated[str | None, typer.Option(help='Size of a local volume, like "1Gi".')] = None,
    kind: Annotated[
        str | None, typer.Option(help="local or s3. Default: s3 if the server stores blobs there.")
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Create an empty volume and print its name."""
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
    volume_id: Annotated[list[str], typer.Argument(metavar="VOLUME...", help="Volume names.")],
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Remove volumes that no session uses, with their contents."""
    with connect(url, api_key) as atoll:
        for one in volume_id:
            atoll.volumes.delete(one)
    output.removed(volume_id, json=json)
