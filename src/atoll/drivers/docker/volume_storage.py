"""
Workspaces as volumes of the engine: for one on another machine, one that gives users other numbers,
or a control plane that is not root.

The executor is in a volume too, read-only in containers and named by its content. There is no
directory that containers share with us, so their executors are reached through the engine and keep
no journal; nothing of the blob store's bucket can be mounted, and no volume of the node's disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import secrets
import tarfile
from typing import TYPE_CHECKING, Any

import structlog
from aiodocker.exceptions import DockerError

from atoll.drivers.docker import container_config, portable_interpreter
from atoll.drivers.docker.engine import translated
from atoll.drivers.docker.labels import Label
from atoll.drivers.docker.scratch_containers import FILL, owned_directory
from atoll.drivers.docker.storage import InstanceFiles
from atoll.drivers.shared import executor_bundle
from atoll.drivers.shared.paths import EXECUTOR, INSIDE
from atoll.errors import InvalidRequest, TemporaryError, WorkspaceLost
from atoll.model.volume import S3

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.scratch_containers import ScratchContainers
    from atoll.model.instance import InstanceSpec
    from atoll.model.resources import Resources
    from atoll.model.volume import Volume

SHARED = "/run/atoll"
"""Directory of `EXECUTOR` and `INSIDE`."""
WHOLE = "whole"
"""The file that is unpacked last."""
FILL_SECONDS, FILL_LOOK = 30.0, 0.2
PROBE_SIZE = 16 * 1024 * 1024
NOT_THERE, TAKEN = 404, 409

log = structlog.get_logger(__name__)


class NoPlaces:
    """Of a node where nothing can be mounted but workspaces."""

    def trouble(self) -> str | None:
        return "its workspaces are volumes of a Docker engine"

    async def make(self, volume: Volume) -> None:
        raise _refusal(volume)

    async def check(self, volume: Volume, *, read_only: bool) -> None:
        raise _refusal(volume)

    async def check_unused(self, volume: Volume) -> None: ...

    async def remove(self, volume: Volume) -> None: ...

    async def broken(self) -> list[str]:
        return []

    async def discard(self, prefix: str) -> None: ...

    def close(self) -> None: ...


def _refusal(volume: Volume) -> InvalidRequest:
    return InvalidRequest(
        f"Volume {volume.id} cannot be had on this node: its workspaces are volumes of a Docker "
        "engine (ATOLL_DOCKER__STORAGE).",
        code="mount_unavailable" if volume.kind == S3 else "isolation_unavailable",
    )


class VolumeStorage:
    journals = False
    copies = False

    def __init__(
        self, engine: Engine, scratch: ScratchContainers, node: str, place: Path, uids: range
    ) -> None:
        """
        `node` is the label of all that is ours, `place` a directory for copies of our files, `uids`
        are those of workspaces.
        """
        self._uids = uids
        self._engine = engine
        self._scratch = scratch
        self._node = node
        self._place = place
        self.quota = False
        self.places = NoPlaces()
        self._lent: str | None = None
        """The volume of the interpreter for images that have none, once it was needed."""
        self._lending = asyncio.Lock()
        self._whole = False
        """Whether the volume of our files was filled to its end."""
        self._sharing = asyncio.Lock()

    # The node

    async def open(self) -> None:
        self._archive = await asyncio.to_thread(self._packed)
        tag = hashlib.sha256(self._archive).hexdigest()[:16]
        self._shared = f"atoll-{self._node}-{tag}"
        with translated():
            await self._scratch.clear()
            await self._share()
            await self._drop_older()
            self.quota = await self._has_quota()

    def _packed(self) -> bytes:
        executor, inside = (
            executor_bundle.write(self._place),
            executor_bundle.write_inside(self._place),
        )
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as archive:
            archive.add(executor, EXECUTOR.removeprefix(f"{SHARED}/"), filter=_plain)
            archive.add(inside, INSIDE.removeprefix(f"{SHARED}/"), filter=_plain)
            place = tarfile.TarInfo(portable_interpreter.PLACE.removeprefix(f"{SHARED}/"))
            # What is mounted there finds no other place in a volume that is read-only.
            place.type, place.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(_plain(place))
            archive.addfile(_plain(tarfile.TarInfo(WHOLE)))
        return content.getvalue()

    async def interpreter(self) -> dict[str, Any]:
        async with self._lending:
            if self._lent is None or await self._get(self._lent) is None:
                self._lent = None
                lent = await asyncio.to_thread(portable_interpreter.write, self._place)
                name = f"atoll-{self._node}-{lent.name}"
                with translated():
                    await self._fill(
                        name, portable_interpreter.PLACE, await asyncio.to_thread(_tree, lent)
                    )
                self._lent = name
        return _mount(self._lent, portable_interpreter.PLACE, read_only=True)

    async def _fill(self, volume: str, target: str, archive: bytes) -> None:
        """Make a volume with our files, unless it is whole. Who has the draft fills it."""
        await self._make(volume, {Label.SHARED: ""})
        name, waited = f"{FILL}{volume}", 0.0
        mount = _mount(volume, target)
        while True:
            try:
                async with self._scratch.made(mount, name=name) as draft:
                    if await self._scratch.get(draft, f"{target}/{WHOLE}") is None:
                        await self._scratch.put(draft, target, archive)
                return
            except DockerError as error:
                if error.status != TAKEN:
                    raise
            if waited > FILL_SECONDS:
                await self._scratch.remove(name)
            await asyncio.sleep(FILL_LOOK)
            waited += FILL_LOOK

    async def _drop_older(self) -> None:
        for name in await self._names(Label.SHARED):
            if name != self._shared:
                with contextlib.suppress(DockerError):  # Containers of before have it still.
                    await self._remove(name)

    async def _has_quota(self) -> bool:
        """Whether the engine holds volumes to their size."""
        name = f"atoll-{self._node}-probe"
        try:
            await self._make(name, {}, PROBE_SIZE)
        except DockerError as error:
            log.info("volumes.without_quota", error=error.message)
            return False
        await self._remove(name)
        return True

    # Instances

    async def prepare(self, spec: InstanceSpec) -> InstanceFiles:
        for volume, _ in spec.volumes:
            raise _refusal(volume)
        if spec.prefix is not None:
            raise InvalidRequest(
                f"Instance {spec.instance_id} cannot have its workspace mounted on this node.",
                code="mount_unavailable",
            )
        name = spec.workspace or spec.instance_id
        with translated():
            await self._share()
            if spec.workspace is None:
                await self._make_workspace(name, spec.resources.disk)
            found = await self._get(_name(name))
            if found is None:
                raise WorkspaceLost(f"Workspace {name} is not on this node.")
        mounts = [
            _mount(self._shared, SHARED, read_only=True),
            _mount(_name(name), container_config.WORKSPACE),
        ]
        return InstanceFiles(mounts, _uid(found), disk_held=self.quota)

    async def _share(self) -> None:
        """Fill the volume of our files again, when somebody has removed it."""
        async with self._sharing:
            if not self._whole or await self._get(self._shared) is None:
                self._whole = False
                await self._fill(self._shared, SHARED, self._archive)
                self._whole = True

    async def _make_workspace(self, name: str, size: int) -> None:
        labels: dict[str, str] = {
            Label.WORKSPACE: name,
            Label.SIZE: str(size),
            Label.UID: str(secrets.choice(self._uids)),
        }
        await self._make(_name(name), labels, size if self.quota else None)
        found = await self._get(_name(name))
        if found is None:
            raise TemporaryError(f"Workspace {name} is gone.", code="workspace_lost")
        # One that was there already, after an interrupted call, has another number.
        async with self._scratch.made(_mount(_name(name), container_config.WORKSPACE)) as draft:
            await self._scratch.put(
                draft, "/", owned_directory(container_config.WORKSPACE, _uid(found))
            )

    async def seal(self, instance_id: str, workspace: str) -> None: ...

    def socket(self, instance_id: str) -> None: ...

    async def clear(self, instance_id: str) -> None: ...

    async def instances(self) -> list[str]:
        return []

    # Workspaces

    async def discard(self, workspace: str) -> None:
        with translated():
            try:
                await self._remove(_name(workspace))
                return
            except DockerError as error:
                if error.status != TAKEN:
                    raise
            await self._scratch.free(_name(workspace))
            try:
                await self._remove(_name(workspace))
            except DockerError as error:
                if error.status != TAKEN:
                    raise
                raise TemporaryError(
                    f"Workspace {workspace} is in use by a container.", code="workspace_busy"
                ) from error

    async def copy(self, workspace: str, name: str) -> bool:
        return False

    async def names(self) -> list[str]:
        with translated():
            found = await self._names(Label.WORKSPACE)
        return sorted(name.removeprefix(_name("")) for name in found)

    async def fits(self, workspace: str, resources: Resources) -> bool:
        if not self.quota:
            return True
        with translated():
            found = await self._get(_name(workspace))
        return found is None or found["Labels"].get(Label.SIZE) == str(resources.disk)

    # The engine's volumes

    async def _make(self, name: str, labels: dict[str, str], size: int | None = None) -> None:
        body = {
            "Name": name,
            "Driver": "local",
            "DriverOpts": {} if size is None else {"size": str(size)},
            "Labels": {Label.NODE: self._node, **labels},
        }
        async with self._engine.query(
            "volumes/create", method="POST", data=json.dumps(body)
        ) as response:
            await response.read()

    async def _get(self, name: str) -> dict[str, Any] | None:
        try:
            async with self._engine.query(f"volumes/{name}") as response:
                return dict(await response.json())
        except DockerError as error:
            if error.status == NOT_THERE:
                return None
            raise

    async def _remove(self, name: str) -> None:
        try:
            async with self._engine.query(f"volumes/{name}", method="DELETE"):
                pass
        except DockerError as error:
            if error.status != NOT_THERE:
                raise

    async def _names(self, label: str) -> list[str]:
        filters = {"label": [f"{Label.NODE}={self._node}", label]}
        async with self._engine.query(
            "volumes", params={"filters": json.dumps(filters)}
        ) as response:
            return [str(one["Name"]) for one in (await response.json())["Volumes"] or []]


def _uid(volume: dict[str, Any]) -> int:
    """Of a workspace; those of earlier versions have no such label."""
    return int((volume["Labels"] or {}).get(Label.UID, container_config.UID))


def _name(workspace: str) -> str:
    return f"atoll-{workspace}"


def _mount(volume: str, target: str, *, read_only: bool = False) -> dict[str, Any]:
    return {
        "Type": "volume",
        "Source": volume,
        "Target": target,
        "ReadOnly": read_only,
        # What an image has there is not for the volume.
        "VolumeOptions": {"NoCopy": True},
    }


def _tree(place: Path) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.add(place, ".", filter=_plain)
        archive.addfile(_plain(tarfile.TarInfo(WHOLE)))
    return content.getvalue()


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """The same whenever and by whomever it is packed."""
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
