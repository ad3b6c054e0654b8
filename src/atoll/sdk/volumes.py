"""Volumes: files that several sessions share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.sdk.decode import decode
from atoll.sdk.paths import url_segment
from atoll.sdk.retry import new_key
from atoll.sdk.values import VolumeInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.sdk.http_client import HttpClient


class AsyncVolumes:
    """All volumes of the server."""

    def __init__(self, http: HttpClient) -> None:
        self._http = http

    async def create(
        self, volume_id: str, *, size: str | int | None = None, kind: str | None = None
    ) -> VolumeInfo:
        """
        A new, empty volume of this name.

        `kind` is `local`, on the disk of one node and of a `size` in bytes or like "1Gi", or `s3`,
        in the bucket of the server's blobs and as large as that allows. Without one it is `s3`
        where blobs are on S3.
        """
        body = {"id": volume_id, "size": None if size is None else str(size), "kind": kind}
        given = {name: value for name, value in body.items() if value is not None}
        answer = await self._http.call_once("volumes", key=new_key(), body=given)
        return decode(VolumeInfo, answer)

    async def get(self, volume_id: str) -> VolumeInfo:
        answer = await self._http.call("GET", f"volumes/{url_segment(volume_id)}")
        return decode(VolumeInfo, answer)

    async def list(self) -> AsyncIterator[VolumeInfo]:
        async for item in self._http.pages("volumes"):
            yield decode(VolumeInfo, item)

    async def delete(self, volume_id: str) -> None:
        """With all that is in it; raises `Conflict` while a session has it."""
        await self._http.call("DELETE", f"volumes/{url_segment(volume_id)}")
