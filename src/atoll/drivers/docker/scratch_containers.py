"""
Containers that are created and never started.

Through one, the engine reads and writes files of a volume, and shows whether it sees a directory of
this machine. Their image is Atoll's own and contains only an empty workspace directory.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import tarfile
from datetime import datetime
from typing import TYPE_CHECKING, Any

from aiodocker.exceptions import DockerError

from atoll.drivers.docker import container_config
from atoll.drivers.docker.errors import CONFLICT, NOT_FOUND, ignored, translated
from atoll.drivers.docker.labels import Label

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.drivers.docker.engine import Engine

REPOSITORY, TAG = "atoll-workspace", "1"
IMAGE = f"{REPOSITORY}:{TAG}"
SCRATCH, FILL = NAME_PREFIXES = ("atoll-draft-", "atoll-fill-")
MAX_AGE = 600
"""Seconds after which a container must belong to a process that was killed."""
_TAR = {"Content-Type": "application/x-tar"}


class ScratchContainers:
    """Methods raise `DockerError` and are called inside `translated`."""

    def __init__(self, engine: Engine, node: str) -> None:
        """`node` is the value of `Label.NODE` on this node's containers."""
        self._engine = engine
        self._node = node

    async def remove_abandoned(self) -> None:
        now = datetime.fromisoformat(self._engine.info["SystemTime"][:19] + "+00:00").timestamp()
        for found in await self._list({"label": [f"{Label.NODE}={self._node}", Label.SCRATCH]}):
            if now - found["Created"] > MAX_AGE:
                await self.remove(found["Id"])

    async def remove_users_of(self, volume: str) -> None:
        for found in await self._list({"label": [Label.SCRATCH], "volume": [volume]}):
            await self.remove(found["Id"])

    async def _list(self, filters: dict[str, list[str]]) -> list[dict[str, Any]]:
        # The names are checked too: a container of any image may have inherited the label.
        found = await self._engine.containers(filters)
        return [one for one in found if _is_scratch(one)]

    @contextlib.asynccontextmanager
    async def create(self, *mounts: dict[str, Any], name: str | None = None) -> AsyncIterator[str]:
        """A container with these mounts, by its id. It is removed at the end."""
        name = name or f"{SCRATCH}{secrets.token_hex(8)}"
        try:
            try:
                container = await self._create(name, mounts)
            except DockerError as error:
                if error.status != NOT_FOUND:
                    raise
                await self._import_image()
                container = await self._create(name, mounts)
            yield container
        except DockerError as error:
            if error.status != CONFLICT:
                await self.remove(name)
            raise
        except BaseException:
            # After a cancellation, the engine may still have created it.
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
        container = await self._engine.docker.containers.create(body, name=name)
        return str(container.id)

    async def remove(self, name: str) -> None:
        with ignored(NOT_FOUND):
            await self._engine.call("DELETE", f"containers/{name}", params={"force": "1"})

    async def _import_image(self) -> None:
        await self._engine.call(
            "POST",
            "images/create",
            params={"fromSrc": "-", "repo": REPOSITORY, "tag": TAG},
            data=directory_tar(container_config.WORKSPACE, container_config.UID),
            headers=_TAR,
        )

    # Files

    async def unpack(self, container: str, path: str, archive: bytes) -> None:
        """Unpack a tar file into a directory of the container."""
        await self._engine.call(
            "PUT",
            f"containers/{container}/archive",
            params={"path": path},
            data=io.BytesIO(archive),  # Sent in pieces.
            headers=_TAR,
        )

    async def read(self, container: str, path: str) -> bytes | None:
        """Content of a small file of the container; null if it does not exist."""
        archive = None
        with ignored(NOT_FOUND):
            archive = await self._engine.call(
                "GET", f"containers/{container}/archive", params={"path": path}
            )
        if archive is None:
            return None
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                file = tar.extractfile(member)
                if file is not None:
                    return file.read()
        return None


def _is_scratch(listed: dict[str, Any]) -> bool:
    return any(name.removeprefix("/").startswith(NAME_PREFIXES) for name in listed["Names"] or ())


def directory_tar(path: str, uid: int) -> bytes:
    """A tar file that contains only a directory with mode 0700."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        directory = tarfile.TarInfo(path.lstrip("/"))
        directory.type, directory.mode = tarfile.DIRTYPE, 0o700
        directory.uid = directory.gid = uid
        archive.addfile(directory)
    return content.getvalue()
