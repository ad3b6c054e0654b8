"""
Containers that are made and never started, for what an engine does to files of one that is not.

They are of an image of our own that has nothing but an empty workspace.
"""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import tarfile
from datetime import datetime
from typing import TYPE_CHECKING, Any

from aiodocker.exceptions import DockerError

from atoll.drivers.docker import container_config
from atoll.drivers.docker.engine import translated
from atoll.drivers.docker.labels import Label

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.drivers.docker.engine import Engine

REPOSITORY, TAG = "atoll-workspace", "1"
IMAGE = f"{REPOSITORY}:{TAG}"
DRAFT, FILL = NAMES = ("atoll-draft-", "atoll-fill-")
OLD_SECONDS = 600
"""A draft of that age is nobody's any more."""
NOT_THERE = 404
_TAR = {"Content-Type": "application/x-tar"}


class ScratchContainers:
    """Methods raise `DockerError`: they are to be called inside `translated`."""

    def __init__(self, engine: Engine, node: str) -> None:
        """`node` is the label of all that is ours."""
        self._engine = engine
        self._node = node

    async def clear(self) -> None:
        """Remove what was left by those who did not come to their end."""
        now = datetime.fromisoformat(self._engine.info["SystemTime"][:19] + "+00:00").timestamp()
        labels = [f"{Label.NODE}={self._node}", Label.SCRATCH]
        for found in await self._listed(label=labels):
            if now - found["Created"] > OLD_SECONDS:
                await self.remove(found["Id"])

    async def free(self, volume: str) -> None:
        """Remove those that have a volume."""
        for found in await self._listed(label=[Label.SCRATCH], volume=[volume]):
            await self.remove(found["Id"])

    async def _listed(self, **filters: list[str]) -> list[dict[str, Any]]:
        params = {"all": "1", "filters": json.dumps(filters)}
        async with self._engine.query("containers/json", params=params) as response:
            # By their names too, which are ours to give: labels come with images.
            return [
                one
                for one in await response.json()
                if any(name.removeprefix("/").startswith(NAMES) for name in one["Names"] or ())
            ]

    @contextlib.asynccontextmanager
    async def made(self, *mounts: dict[str, Any], name: str | None = None) -> AsyncIterator[str]:
        """One with these mounts, by its id."""
        name = name or f"{DRAFT}{secrets.token_hex(8)}"
        try:
            try:
                draft = await self._create(name, mounts)
            except DockerError as error:
                if error.status != NOT_THERE:
                    raise
                await self._import()
                draft = await self._create(name, mounts)
            yield draft
        except DockerError as error:
            if error.status != 409:
                await self.remove(name)
            raise
        except BaseException:
            # Also when it was cut off while it was made.
            with translated():
                await self.remove(name)
            raise
        else:
            await self.remove(name)

    async def _create(self, name: str, mounts: tuple[dict[str, Any], ...]) -> str:
        body: dict[str, Any] = {
            "Image": IMAGE,
            "Cmd": ["/nothing"],
            "Labels": {Label.NODE: self._node, Label.SCRATCH: ""},
            "NetworkDisabled": True,
            "HostConfig": {"Mounts": list(mounts), "NetworkMode": "none"},
        }
        made = await self._engine.docker.containers.create(body, name=name)
        return str(made.id)

    async def remove(self, name: str) -> None:
        try:
            async with self._engine.query(
                f"containers/{name}", method="DELETE", params={"force": "1"}
            ):
                return
        except DockerError as error:
            if error.status != NOT_THERE:
                raise

    async def _import(self) -> None:
        content = owned_directory(container_config.WORKSPACE, container_config.UID)
        params = {"fromSrc": "-", "repo": REPOSITORY, "tag": TAG}
        async with self._engine.query(
            "images/create", method="POST", params=params, data=content, headers=_TAR
        ) as response:
            await response.read()

    # Files

    async def put(self, draft: str, path: str, archive: bytes) -> None:
        """Unpack a tar file into a directory of the draft."""
        async with self._engine.query(
            f"containers/{draft}/archive",
            method="PUT",
            params={"path": path},
            data=io.BytesIO(archive),  # Sent in pieces.
            headers=_TAR,
        ):
            pass

    async def get(self, draft: str, path: str) -> bytes | None:
        """A small file of the draft; none when it is not there."""
        try:
            async with self._engine.query(
                f"containers/{draft}/archive", params={"path": path}
            ) as response:
                content = io.BytesIO(await response.read())
        except DockerError as error:
            if error.status == NOT_THERE:
                return None
            raise
        with tarfile.open(fileobj=content) as archive:
            for member in archive:
                file = archive.extractfile(member)
                if file is not None:
                    return file.read()
        return None


def owned_directory(path: str, uid: int) -> bytes:
    """A tar with nothing but a directory, for its owner alone."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        place = tarfile.TarInfo(path.lstrip("/"))
        place.type, place.mode = tarfile.DIRTYPE, 0o700
        place.uid = place.gid = uid
        archive.addfile(place)
    return content.getvalue()
