"""
Where sessions' files are on a node with a Docker engine.

`Directories` keeps them beneath the data directory, which the engine must see at the same path, and
gives containers a place for their socket and their journal too: what user code must not touch there
is closed to it once the executor has opened it, before any user code runs. That takes root, because
files in the container belong to another user.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import subprocess
import threading
from typing import TYPE_CHECKING, Any, Protocol

from atoll import ids
from atoll.drivers import bundle
from atoll.drivers.docker import containers, interpreter, journals
from atoll.drivers.local import host
from atoll.drivers.local.places import Places
from atoll.drivers.local.workspaces import Workspace, Workspaces, remove_tree
from atoll.errors import NotFound, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from atoll.drivers import base
    from atoll.drivers.local.buckets import Bucket
    from atoll.model.instance import InstanceSpec
    from atoll.model.resources import Resources
    from atoll.settings import LocalSettings


class Storage(Protocol):
    journals: bool
    """Whether results that nobody has taken outlive their instance."""
    quota: bool
    """Whether the engine holds the size of a workspace."""
    copies: bool
    """Whether there is `copy`."""

    @property
    def places(self) -> base.Places: ...

    async def open(self) -> None: ...

    async def prepare(self, spec: InstanceSpec) -> list[dict[str, Any]]:
        """
        Make what the instance needs, its workspace too when it names none, and tell what is to be
        mounted. `NotFound`, `workspace_lost`, when the one that it names is not there.
        """

    async def interpreter(self) -> dict[str, Any]:
        """
        What is to be mounted for an image that has no Python. `PermanentError` with code
        `interpreter_missing` when there is no such thing here.
        """

    async def seal(self, instance_id: str, workspace: str) -> None:
        """The executor has opened what is its own: nobody else in the container is to."""

    def socket(self, instance_id: str) -> Path | None:
        """The directory of the socket that the executor listens on; none where it has none."""

    async def clear(self, instance_id: str) -> None:
        """Remove all but the workspace, of an instance whose container is gone."""

    async def instances(self) -> list[str]:
        """Those of which there is something."""

    async def discard(self, workspace: str) -> None: ...

    async def copy(self, workspace: str, name: str) -> bool: ...

    async def names(self) -> list[str]: ...

    async def fits(self, workspace: str, resources: Resources) -> bool:
        """Whether a workspace can go on with these resources as it is."""


class Directories:
    journals = True
    quota = False
    copies = True

    def __init__(
        self, node: Path, settings: LocalSettings, bucket: Bucket | None, packages: Path
    ) -> None:
        self._node = node
        self._lent: Path | None = None
        """The interpreter for images that have none, once it was needed."""
        self._lending = asyncio.Lock()
        self._instances = node / "instances"
        self._packages = packages
        self.places = Places(node, self._instances, settings, bucket)
        self._workspaces = Workspaces(
            node / "workspaces", settings, images=False, own_uids=False, uid=containers.UID
        )

    async def open(self) -> None:
        await asyncio.to_thread(self._open)

    def _open(self) -> None:
        self._node.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._node.chmod(0o700)
        self._instances.mkdir(exist_ok=True, mode=0o700)
        self._workspaces.open()
        self.places.open(images=host.image_trouble(self._node))
        self._shared = containers.shared(
            str(bundle.write(self._node)), str(bundle.write_inside(self._node)), str(self._packages)
        )

    async def prepare(self, spec: InstanceSpec) -> list[dict[str, Any]]:
        with translated(spec.instance_id):
            return await asyncio.to_thread(self._prepare, spec)

    def _prepare(self, spec: InstanceSpec) -> list[dict[str, Any]]:
        name = spec.workspace or spec.instance_id
        workspace = self._workspaces.get(name)
        if workspace is None:
            if spec.workspace is not None:
                raise NotFound(f"Workspace {name} is not on this node.", code="workspace_lost")
            if spec.prefix is not None:
                self.places.make_prefix(spec.prefix)
            workspace = self._workspaces.make(name, spec.resources.disk, spec.prefix)
        directory = self._instances / spec.instance_id
        directory.mkdir(mode=0o700, exist_ok=True)
        link, journal = directory / "link", self._journal(workspace)
        # Of an instance whose container somebody else has removed: nothing listens there.
        remove_tree(link)
        for place in (link, journal):
            place.mkdir(mode=0o700, exist_ok=True)
            for file in os.scandir(place):
                os.chown(file.path, containers.UID, containers.UID, follow_symlinks=False)
            os.chown(place, containers.UID, containers.UID)
        self.places.attach(spec, workspace)
        files = self.places.files(workspace) or self._workspaces.path(workspace)
        bind = containers.bind
        return [
            *self._shared,
            bind(str(files), containers.WORKSPACE, read_only=False),
            bind(str(link), containers.LINK, read_only=False),
            bind(str(journal), containers.JOURNAL, read_only=False),
            *(
                bind(str(self.places.source(volume)), mount.path, read_only=mount.read_only)
                for volume, mount in spec.volumes
            ),
        ]

    def _journal(self, workspace: Workspace) -> Path:
        return self._workspaces.journal(workspace)[0].parent / "journal"

    async def interpreter(self) -> dict[str, Any]:
        async with self._lending:
            if self._lent is None:
                with translated("the interpreter"):
                    self._lent = await asyncio.to_thread(interpreter.write, self._node)
        return containers.bind(str(self._lent), interpreter.PLACE, read_only=True)

    async def seal(self, instance_id: str, workspace: str) -> None:
        await asyncio.to_thread(self._seal, instance_id, workspace)

    def _seal(self, instance_id: str, workspace: str) -> None:
        found = self._workspaces.get(workspace)
        if found is None:
            raise TemporaryError(f"Workspace {workspace} is gone.", code="workspace_lost")
        for place in (self._instances / instance_id / "link", self._journal(found)):
            os.chown(place, 0, 0)
            # What a template imports runs before this, as who owned it until now.
            os.chmod(place, 0o700)
        journals.protect(self._journal(found))

    def socket(self, instance_id: str) -> Path:
        return self._instances / instance_id / "link"

    async def clear(self, instance_id: str) -> None:
        with translated(instance_id):
            await asyncio.to_thread(self._clear, instance_id)

    def _clear(self, instance_id: str) -> None:
        if not ids.is_instance_id(instance_id):
            raise ValueError(f"{instance_id[:100]!r} is no instance's: nothing is removed by it.")
        with self.places.detached(instance_id):
            remove_tree(self._instances / instance_id)

    async def instances(self) -> list[str]:
        with translated("this node"):
            return await asyncio.to_thread(lambda: sorted(os.listdir(self._instances)))

    async def discard(self, workspace: str) -> None:
        await asyncio.to_thread(self._workspaces.remove, workspace)

    async def copy(self, workspace: str, name: str) -> bool:
        abandoned = threading.Event()
        copying = asyncio.ensure_future(asyncio.to_thread(self._copy, workspace, name, abandoned))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            # A thread cannot be called back. It is told, and ends before the next call can begin.
            abandoned.set()
            await asyncio.wait([copying])
            if not copying.cancelled():
                copying.exception()
            raise

    def _copy(self, workspace: str, name: str, abandoned: threading.Event) -> bool:
        source = self._workspaces.get(workspace)
        if source is None:
            return False
        with translated(workspace, "workspace_not_copied"):
            return self._workspaces.copy(source, name, abandoned)

    async def names(self) -> list[str]:
        return await asyncio.to_thread(self._workspaces.names)

    async def fits(self, workspace: str, resources: Resources) -> bool:
        return True


@contextlib.contextmanager
def translated(name: str, code: str = "instance_not_started") -> Iterator[None]:
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise TemporaryError(
            f"The files of {name} could not be made or removed: {error}",
            code="node_full" if full else code,
        ) from error
