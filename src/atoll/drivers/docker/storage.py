"""Where sessions' files are on a node with a Docker engine: what the driver asks of any place."""

from __future__ import annotations

import contextlib
import errno
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from atoll.drivers import base
    from atoll.model.instance import InstanceSpec
    from atoll.model.resources import Resources


@dataclass(frozen=True)
class InstanceFiles:
    """What a container is made with for its files."""

    mounts: list[dict[str, Any]]
    uid: int
    """Who owns the workspace, and runs all that is in the container."""
    disk_held: bool
    """Whether a file system holds the size of the workspace."""


class Storage(Protocol):
    journals: bool
    """Whether results that nobody has taken outlive their instance."""
    quota: bool
    """Whether a file system holds the size of new workspaces."""
    copies: bool
    """Whether there is `copy`."""

    @property
    def places(self) -> base.Places: ...

    async def open(self) -> None: ...

    async def prepare(self, spec: InstanceSpec) -> InstanceFiles:
        """
        Make what the instance needs, its workspace too when it names none. `NotFound`,
        `workspace_lost`, when the one that it names is not there.
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
