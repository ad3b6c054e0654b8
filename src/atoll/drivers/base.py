"""The contract of a driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from datetime import timedelta

    from atoll.link.client import Link
    from atoll.model.instance import Capabilities, Handle, InstanceSpec, Observation
    from atoll.model.node import NodeMetrics
    from atoll.model.resources import Resources
    from atoll.model.template import Template
    from atoll.model.volume import Volume


class Places(Protocol):
    """What of a node, and of the blob store, several instances are shown: volumes above all."""

    def trouble(self) -> str | None:
        """Why nothing of the blob store's bucket can be mounted here; none when it can."""

    async def make(self, volume: Volume) -> None:
        """An empty one, whatever may be left of another of this name."""

    async def check(self, volume: Volume, *, read_only: bool) -> None:
        """
        Raise `InvalidRequest` with code `isolation_unavailable` or `mount_unavailable` when an
        instance here cannot have it so.
        """

    async def remove(self, volume: Volume) -> None:
        """With all that is in it. `Conflict`, `volume_in_use`, while an instance has it."""

    async def broken(self) -> list[str]:
        """Ids of the instances that have one which does not answer any more."""

    async def discard(self, prefix: str) -> None:
        """Remove the files of a workspace that was in the bucket; no instance may have it."""


class Driver(Protocol):
    """
    Every method may be called twice, may be cancelled at any await, and must leave the node such
    that calling it once more finishes the work. Gone is an observation, not an error.
    """

    kind: str
    capabilities: Capabilities

    @property
    def places(self) -> Places: ...

    async def open(self) -> None: ...

    async def close(self) -> None:
        """Let go of the node; instances that are not ephemeral stay."""

    async def check(self, template: Template) -> None:
        """
        Raise `InvalidRequest` when this node cannot make instances of the template as it demands.
        """

    async def ensure(self, spec: InstanceSpec) -> Handle:
        """An instance as described; the one that is there already, when there is one."""

    async def observe(self, handle: Handle) -> Observation: ...

    async def connect(self, handle: Handle) -> Link:
        """A link to the executor, which is ready to run."""

    async def resize(self, handle: Handle, resources: Resources) -> bool:
        """Set other limits on a running instance; whether that can be done without a new one."""

    def run_limits(self, resources: Resources) -> tuple[dict[str, int], dict[str, int]]:
        """What the executor must limit for us: rlimits by name, and what it has to watch."""

    async def out_of_memory(self, handle: Handle) -> bool:
        """Whether the kernel ended a process for memory since this was last asked."""

    async def stop(self, handle: Handle, *, grace: timedelta) -> None: ...

    async def destroy(self, handle: Handle) -> None:
        """Remove the instance and all it took, except its workspace."""

    async def discard(self, workspace: str) -> None:
        """Remove a workspace."""

    async def handles(self) -> list[Handle]:
        """What is really there, for recovery."""

    async def workspaces(self) -> list[str]: ...

    async def health(self) -> str | None:
        """Why no instance can be made here at the moment, as far as is known; none if one can."""

    async def metrics(self) -> NodeMetrics: ...

    def workspace_of(self, handle: Handle) -> str: ...
