"""Volumes, and where sessions mount them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from atoll.api.rest.schemas.base import From, Page, RequestBody, ResponseBody, encoder_of
from atoll.api.rest.schemas.types import Name
from atoll.model.resources import format_size
from atoll.model.volume import Volume, VolumeMount


class VolumeMountIn(RequestBody):
    volume_id: Name
    path: Annotated[
        str,
        StringConstraints(pattern=r"^/(mnt|data|volumes)(/[A-Za-z0-9][A-Za-z0-9._-]{0,62}){1,4}$"),
    ] = Field(description="Mount point in the session: below /mnt, /data or /volumes.")
    read_only: bool = True

    def mount(self) -> VolumeMount:
        return VolumeMount(**self.model_dump())


class VolumeMountOut(VolumeMountIn, ResponseBody):
    pass


class CreateVolume(RequestBody):
    id: Name
    size: str | None = Field(
        None,
        description="Size of a local volume; the default size of workspaces if omitted.",
        examples=["1Gi"],
    )
    kind: Literal["local", "s3"] | None = Field(
        None,
        description="`local`: on the disk of this node. `s3`: in the bucket of the blob store, for "
        "all nodes; the default where the bucket can be mounted.",
    )


class VolumeOut(ResponseBody, of=Volume):
    id: str
    kind: Literal["local", "s3"]
    size: Annotated[
        str | None, From(lambda volume: format_size(volume.size) if volume.size else None)
    ] = Field(description="Null where the bucket sets the limit.")
    node_id: str | None = Field(description="The node that has it; null if all nodes have it.")
    created_at: datetime


class VolumePage(Page[VolumeOut]):
    pass


volume_out = encoder_of(VolumeOut)
