"""
Contract of the two places where a Docker node keeps the files of sessions: directories of this
machine (`DirectoryStorage`) and volumes of the engine (`VolumeStorage`).
"""

from __future__ import annotations

import contextlib
import errno
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from atoll.errors import InstanceNotStarted, NodeFull, TemporaryError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from atoll.drivers.shared.volumes.node_volumes import NodeVolumes
    from atoll.model.instance import InstanceSpec
    from atoll.model.resources import Resources


@dataclass(frozen=True)
class InstanceFiles:
    """The files that a container is created with."""

    mounts: list[dict[str, Any]]
    uid: int
    """The user that owns the workspace and runs everything in the container."""
    size_is_limited: bool
    """Whether a file system limits the size of the workspace."""


class Storage(Protocol):
    journals: bool
    """Whether the executor's journal outlives its instance."""
    quota: bool
    """Whether a file system limits the size of new workspaces."""
    copies: bool
    """Whether `copy` is supported."""

    @property
    def volumes(self) -> NodeVolumes | None: ...

    def close(self) -> None: ...

    async def open(self) -> None: ...

    async def prepare(self, spec: InstanceSpec) -> InstanceFiles:
        """
        Make the files that the instance needs, including a workspace if the spec names none. Raises
        `WorkspaceLost` if the workspace that it names does not exist.
        """

    async def interpreter(self) -> dict[str, Any]:
        """
        The mount of an interpreter for images without Python. Raises `InterpreterMissing` if this
        machine's interpreter cannot be used for that.
        """

    async def seal(self, instance_id: str, workspace: str) -> None:
        """Close the executor's own files to user code. The executor has opened them."""

    def socket(self, instance_id: str) -> Path | None:
        """The directory of the executor's socket; null if there is none on this machine."""

    async def clear(self, instance_id: str) -> None:
        """Remove everything but the workspace of an instance whose container is gone."""

    async def instances(self) -> list[str]:
        """Ids of the instances that have files here."""

    async def discard(self, workspace: str) -> None: ...

    async def copy(self, workspace: str, name: str) -> bool: ...

    async def names(self) -> list[str]:
        """Names of the workspaces."""

    async def fits(self, workspace: str, resources: Resources) -> bool:
        """Whether the workspace's own size allows these resources without a new instance."""


class WorkspaceNotRemoved(TemporaryError):
    code = "workspace_not_removed"


class WorkspaceNotCopied(TemporaryError):
    code = "workspace_not_copied"


@contextlib.contextmanager
def file_errors(name: str, kind: type[TemporaryError] = InstanceNotStarted) -> Iterator[None]:
    """Raise errors of the file system as `NodeFull` if it is full, and as `kind` otherwise."""
    try:
        yield
    except (OSError, subprocess.SubprocessError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (NodeFull if full else kind)(
            f"Cannot create or remove files of {name}: {error}"
        ) from error
