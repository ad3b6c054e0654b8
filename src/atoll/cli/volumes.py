"""`atoll volume …`."""

from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import output
from atoll.cli.options import command_group
from atoll.cli.remote import remote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.sdk.sync import Atoll
    from atoll.sdk.values import VolumeInfo

app = command_group("Volumes: files that several sessions share.")


@app.command()
@remote(line="id")
def create(
    atoll: "Atoll",
    volume_id: Annotated[str, typer.Argument(metavar="VOLUME", help="Volume name.")],
    size: Annotated[str | None, typer.Option(help='Size of a local volume, like "1Gi".')] = None,
    kind: Annotated[
        str | None, typer.Option(help="local or s3. Default: s3 if the server stores blobs there.")
    ] = None,
) -> "VolumeInfo":
    """Create an empty volume and print its name."""
    return atoll.volumes.create(volume_id, size=size, kind=kind)


@app.command("list")
@remote(
    table={"VOLUME": "id", "KIND": "kind", "SIZE": "size", "NODE": "node_id", "AGE": "created_at"}
)
def list_(atoll: "Atoll") -> "Iterator[VolumeInfo]":
    """List volumes, newest first."""
    return atoll.volumes.list()


@app.command()
@remote(show=output.removed)
def delete(
    atoll: "Atoll",
    volume_id: Annotated[list[str], typer.Argument(metavar="VOLUME...", help="Volume names.")],
) -> dict[str, list[str]]:
    """Remove volumes that no session uses, with their contents."""
    for one in volume_id:
        atoll.volumes.delete(one)
    return {"removed": volume_id}
