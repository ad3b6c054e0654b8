"""
Workspaces in volumes of the engine: for an engine on another machine, one that maps user ids, or a
control plane that is not root.

The executor is in a volume too, which is named after its content and mounted read-only. Containers
share no directory with this machine. Their executors are therefore reached through the engine and
keep no journal, and neither the bucket of the blob store nor volumes of the node can be mounted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import structlog
from aiodocker.exceptions import DockerError

from atoll.drivers.docker import container_config
from atoll.drivers.docker.errors import CONFLICT, NOT_FOUND, ignored, translated
from atoll.drivers.docker.labels import Label
from atoll.drivers.docker.scratch_containers import FILL, directory_tar
from atoll.drivers.docker.storage import InstanceFiles
from atoll.drivers.shared import executor_bundle, portable_interpreter
from atoll.drivers.shared.instance_paths import EXECUTOR, INSIDE
from atoll.drivers.shared.uids import new_uid
from atoll.errors import InvalidRequest, TemporaryError, WorkspaceLost
from atoll.model.volume import S3

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.scratch_containers import ScratchContainers
    from atoll.model.instance import InstanceSpec
    from atoll.model.resources import Resources

SHARED = "/run/atoll"
"""Parent directory of `EXECUTOR` and `INSIDE`."""
COMPLETE = "whole"
"""An empty file, last in a volume's archive: the volume is complete if it exists."""
FILL_TIMEOUT, FILL_CHECK_INTERVAL = 30.0, 0.2
PROBE_SIZE = 16 * 1024 * 1024

log = structlog.get_logger(__name__)


class VolumeStorage:
    journals = False
    copies = False
    volumes = None

    def __init__(
        self, engine: Engine, scratch: ScratchContainers, node: str, directory: Path, uids: range
    ) -> None:
        """
        `node` is the value of `Label.NODE`, `directory` holds copies of Atoll's files, and each
        workspace is owned by one of `uids`.
        """
        self._uids = uids
        self._engine = engine
        self._scratch = scratch
        self._node = node
        self._directory = directory
        self.quota = False
        self._interpreter: str | None = None
        """Volume of the portable interpreter, made when an image without Python is first used."""
        self._interpreter_lock = asyncio.Lock()
        self._shared_is_complete = False
        self._shared_lock = asyncio.Lock()

    def close(self) -> None: ...

    async def open(self) -> None:
        self._archive = await asyncio.to_thread(self._pack)
        tag = hashlib.sha256(self._archive).hexdigest()[:16]
        self._shared = f"atoll-{self._node}-{tag}"
        with translated():
            await self._scratch.remove_abandoned()
            await self._make_shared()
            await self._remove_older_shared()
            self.quota = await self._has_quota()

    # Volumes with files of Atoll

    def _pack(self) -> bytes:
        executor = executor_bundle.write(self._directory)
        inside = executor_bundle.write_inside(self._directory)
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as archive:
            archive.add(executor, EXECUTOR.removeprefix(f"{SHARED}/"), filter=_normalized)
            archive.add(inside, INSIDE.removeprefix(f"{SHARED}/"), filter=_normalized)
            # A mount point of its own: none can be created in a read-only volume.
            directory = tarfile.TarInfo(portable_interpreter.TARGET.removeprefix(f"{SHARED}/"))
            directory.type, directory.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(_normalized(directory))
            archive.addfile(_normalized(tarfile.TarInfo(COMPLETE)))
        return content.getvalue()

    async def _make_shared(self) -> None:
        """Fill the shared volume, also if another client removed it."""
        async with self._shared_lock:
            if not self._shared_is_complete or await self._get(self._shared) is None:
                self._shared_is_complete = False
                await self._fill(self._shared, SHARED, self._archive)
                self._shared_is_complete = True

    async def _remove_older_shared(self) -> None:
        for name in await self._names(Label.SHARED):
            if name != self._shared:
                # Containers of an earlier version may still use it.
                with contextlib.suppress(DockerError):
                    await self._remove(name)

    async def interpreter(self) -> dict[str, Any]:
        async with self._interpreter_lock:
            if self._interpreter is None or await self._get(self._interpreter) is None:
                self._interpreter = None
                directory = await asyncio.to_thread(portable_interpreter.write, self._directory)
                name = f"atoll-{self._node}-{directory.name}"
                archive = await asyncio.to_thread(_pack_tree, directory)
                with translated():
                    await self._fill(name, portable_interpreter.TARGET, archive)
                self._interpreter = name
        return _mount(self._interpreter, portable_interpreter.TARGET, read_only=True)

    async def _fill(self, volume: str, target: str, archive: bytes) -> None:
        """
        Make a volume and unpack an archive into it, unless it is complete. The name of the scratch
        container is the lock between replicas.
        """
        await self._make(volume, {Label.SHARED: ""})
        name, waited = f"{FILL}{volume}", 0.0
        mount = _mount(volume, target)
        while True:
            with ignored(CONFLICT):
                async with self._scratch.create(mount, name=name) as container:
                    if await self._scratch.read(container, f"{target}/{COMPLETE}") is None:
                        await self._scratch.unpack(container, target, archive)
                return
            if waited > FILL_TIMEOUT:
                await self._scratch.remove(name)
            await asyncio.sleep(FILL_CHECK_INTERVAL)
            waited += FILL_CHECK_INTERVAL

    async def _has_quota(self) -> bool:
        """Whether the engine can limit the size of volumes."""
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
            raise InvalidRequest(
                f"Volume {volume.id} does not exist on this node: its workspaces are volumes of a "
                "Docker engine (ATOLL_DOCKER__STORAGE).",
                code="mount_unavailable" if volume.kind == S3 else "isolation_unavailable",
            )
        if spec.prefix is not None:
            raise InvalidRequest(
                f"The workspace of instance {spec.instance_id} cannot be mounted from the blob "
                "store on this node.",
                code="mount_unavailable",
            )
        name = spec.workspace or spec.instance_id
        with translated():
            await self._make_shared()
            if spec.workspace is None:
                await self._make_workspace(name, spec.resources.disk)
            found = await self._get(_volume_of(name))
            if found is None:
                raise WorkspaceLost(f"Workspace {name} is not on this node.")
        mounts = [
            _mount(self._shared, SHARED, read_only=True),
            _mount(_volume_of(name), container_config.WORKSPACE),
        ]
        return InstanceFiles(mounts, _uid(found), size_is_limited=self.quota)

    async def _make_workspace(self, name: str, size: int) -> None:
        labels: dict[str, str] = {
            Label.WORKSPACE: name,
            Label.SIZE: str(size),
            Label.UID: str(new_uid(self._uids)),
        }
        await self._make(_volume_of(name), labels, size if self.quota else None)
        found = await self._get(_volume_of(name))
        if found is None:
            raise TemporaryError(f"Workspace {name} is gone.", code="workspace_lost")
        # A volume that an interrupted call left has another uid than the labels above.
        archive = directory_tar(container_config.WORKSPACE, _uid(found))
        mount = _mount(_volume_of(name), container_config.WORKSPACE)
        async with self._scratch.create(mount) as container:
            await self._scratch.unpack(container, "/", archive)

    async def seal(self, instance_id: str, workspace: str) -> None: ...

    def socket(self, instance_id: str) -> None: ...

    async def clear(self, instance_id: str) -> None: ...

    async def instances(self) -> list[str]:
        return []

    # Workspaces

    async def discard(self, workspace: str) -> None:
        volume = _volume_of(workspace)
        with translated():
            with ignored(CONFLICT):
                await self._remove(volume)
                return
            await self._scratch.remove_users_of(volume)
            with ignored(CONFLICT):
                await self._remove(volume)
                return
        raise TemporaryError(
            f"Workspace {workspace} is in use by a container.", code="workspace_busy"
        )

    async def copy(self, workspace: str, name: str) -> bool:
        return False

    async def names(self) -> list[str]:
        with translated():
            found = await self._names(Label.WORKSPACE)
        return sorted(name.removeprefix(_volume_of("")) for name in found)

    async def fits(self, workspace: str, resources: Resources) -> bool:
        if not self.quota:
            return True
        with translated():
            found = await self._get(_volume_of(workspace))
        return found is None or found["Labels"].get(Label.SIZE) == str(resources.disk)

    # The engine's API

    async def _make(self, name: str, labels: dict[str, str], size: int | None = None) -> None:
        body = {
            "Name": name,
            "Driver": "local",
            "DriverOpts": {} if size is None else {"size": str(size)},
            "Labels": {Label.NODE: self._node, **labels},
        }
        await self._engine.call("POST", "volumes/create", data=json.dumps(body))

    async def _get(self, name: str) -> dict[str, Any] | None:
        with ignored(NOT_FOUND):
            return dict(json.loads(await self._engine.call("GET", f"volumes/{name}")))
        return None

    async def _remove(self, name: str) -> None:
        with ignored(NOT_FOUND):
            await self._engine.call("DELETE", f"volumes/{name}")

    async def _names(self, label: str) -> list[str]:
        filters = json.dumps({"label": [f"{Label.NODE}={self._node}", label]})
        answer = await self._engine.call("GET", "volumes", params={"filters": filters})
        return [str(volume["Name"]) for volume in json.loads(answer)["Volumes"] or []]


def _uid(volume: dict[str, Any]) -> int:
    """Owner of a workspace. Volumes of earlier versions have no such label."""
    return int((volume["Labels"] or {}).get(Label.UID, container_config.UID))


def _volume_of(workspace: str) -> str:
    return f"atoll-{workspace}"


def _mount(volume: str, target: str, *, read_only: bool = False) -> dict[str, Any]:
    return {
        "Type": "volume",
        "Source": volume,
        "Target": target,
        "ReadOnly": read_only,
        # The engine would copy the image's files at that path into an empty volume.
        "VolumeOptions": {"NoCopy": True},
    }


def _pack_tree(directory: Path) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.add(directory, ".", filter=_normalized)
        archive.addfile(_normalized(tarfile.TarInfo(COMPLETE)))
    return content.getvalue()


def _normalized(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without time and owner, so that the same files give the same archive."""
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
