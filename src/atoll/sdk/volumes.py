"""Volumes: files that several sessions share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.sdk.arguments import given
from atoll.sdk.decode import decode
from atoll.sdk.http_client import new_key
from atoll.sdk.paths import url_segment
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
        Create an empty volume with this name.

        A `local` volume is on the disk of one node and has a `size` in bytes or like "1Gi". An `s3`
        volume is in the server's bucket and has no size limit of its own. The default `kind` is s3
        if the server stores blobs there.
        """
        body = given(id=volume_id, size=None if size is None else str(size), kind=kind)
        answer = await self._http.call_once("volumes", key=new_key(), body=body)
        return decode(VolumeInfo, answer)

    async def get(self, volume_id: str) -> VolumeInfo:
        return await self._http.fetch(VolumeInfo, "GET", f"volumes/{url_segment(volume_id)}")

    def list(self) -> AsyncIterator[VolumeInfo]:
        return self._http.items(VolumeInfo, "volumes")

    async def delete(self, volume_id: str) -> None:
        """Delete a volume with its contents. Raises `Conflict` while a session uses it."""
        await self._http.call("DELETE", f"volumes/{url_segment(volume_id)}")
