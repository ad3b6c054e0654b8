"""What every sandbox of this machine is started with, and where its mounts come from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.drivers.local.sandbox import LAYERED
from atoll.drivers.local.sandbox_start import ROOT
from atoll.errors import PermanentError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from atoll.drivers.local.sandbox import RootFileSystem
    from atoll.drivers.shared.cgroups import ControlGroups

STAGES = ("/mnt", "/media", "/srv", "/opt")


@dataclass(frozen=True)
class SandboxHost:
    bubblewrap: str
    groups: ControlGroups
    hidden: tuple[str, ...]
    """Parts of /proc to cover, as `sandbox.HIDDEN`; directories end with a slash."""
    seccomp: Path | None
    """The system call filter, if the machine has one."""
    mounts: str
    """The directory of the node's mounts; a sandbox keeps none of them busy."""
    staged: bool
    """Whether sandboxes have uids of their own, and their mounts need a stage."""

    def sources(self, tree: RootFileSystem, path: str, image: str | None = None) -> MountSources:
        """`path` is the writable directory, or the path that stands for its file system `image`."""
        stage = free_stage((*dict(tree.binds), *tree.layers, path)) if self.staged else None
        return MountSources(stage, path if image is not None else None)


class MountSources:
    """
    Maps paths of the host to the sources of a sandbox's mounts.

    An unprivileged uid cannot reach all paths of the host. So the spawner, as root, binds each
    source below a directory that every uid can reach, the stage, in a mount namespace of the
    instance. Without a stage, sources are the paths themselves.
    """

    def __init__(self, stage: str | None, mounted_image: str | None) -> None:
        self.stage = stage
        self.binds: dict[str, str] = {}
        """Names in the stage, by path."""
        self._mounted_image = mounted_image

    def __call__(self, host_path: str) -> str:
        if self.stage is None:
            return host_path
        if host_path.startswith(LAYERED):
            return f"{self.stage}/{ROOT}{host_path.removeprefix(LAYERED)}"
        if host_path == self._mounted_image:
            return f"{self.stage}/workspace"
        return f"{self.stage}/{self.binds.setdefault(host_path, str(len(self.binds)))}"


def free_stage(used: Iterable[str]) -> str:
    """A directory that any uid can reach, and that has none of the paths which are used."""
    paths = [os.path.realpath(path) for path in used]
    for stage in STAGES:
        if os.path.isdir(stage) and not any(path.startswith(f"{stage}/") for path in paths):
            return stage
    raise PermanentError(f"None of {', '.join(STAGES)} can be used to start an instance.")
