"""The contract of a driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from atoll.errors import Conflict

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime, timedelta
    from pathlib import Path

    from atoll.link.client import Link
    from atoll.model.image import ImageInfo
    from atoll.model.instance import Capabilities, Handle, InstanceSpec, Observation
    from atoll.model.node import NodeMetrics
    from atoll.model.packages import EnvironmentInfo, Interpreter, PackageSet
    from atoll.model.resources import Resources
    from atoll.model.template import Layer, Template
    from atoll.model.volume import Volume

    Answer = Callable[[StreamReader, StreamWriter], Awaitable[None]]
    """Who serves a connection that was made inside the sandbox of an installation."""


class NotEmptied(Conflict):
    """What was to be removed has objects left whose names cannot be listed."""

    code = "volume_not_emptied"


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

    async def check_unused(self, volume: Volume) -> None:
        """Raise `Conflict` with code `volume_in_use` while an instance has it."""

    async def remove(self, volume: Volume) -> None:
        """With all that is in it. `Conflict`, `volume_in_use`, while an instance has it."""

    async def broken(self) -> list[str]:
        """Ids of the instances that have one which does not answer any more."""

    async def discard(self, prefix: str) -> None:
        """Remove the files of a workspace that was in the bucket; no instance may have it."""

    def close(self) -> None:
        """Blocking. What is mounted stays so, for the instances that have it."""


@dataclass(frozen=True)
class Wheel:
    """A wheel as the index has it, in a file that no installation can reach."""

    path: Path
    name: str
    """The file's name on the index."""
    digest: str
    """SHA-256, hexadecimal."""


@dataclass(frozen=True)
class InstallSpec:
    """What is to be installed, and how."""

    key: str
    """By which the set is found again."""
    template: Template
    requirements: tuple[str, ...]
    """Names, extras and specifiers, written by us."""
    name: Callable[[tuple[str, ...], tuple[str, ...]], str]
    """
    What an environment with just these packages (`name==version`) is called, made from wheels with
    these digests.
    """
    resources: Resources
    answer: Answer
    """The index, for whatever connects from inside."""
    wheels: Callable[[], list[Wheel]]
    """Those that were given out by `answer`: what is installed has to be theirs."""
    hear: Callable[[bytes], None]
    """Told what is printed."""
    has: dict[str, str]
    """The template's packages, by normalised name."""
    held: dict[str, str] = field(default_factory=dict)
    """Those of them whose versions stand."""
    exact: bool = False
    """Whether the requirements are all that is needed, each in one version."""
    source_builds: bool = False


@dataclass(frozen=True)
class RegistryAuth:
    """By what right images of a registry are pulled: a name and a password, or a token."""

    server: str
    username: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)


@dataclass(frozen=True)
class BuildContext:
    """The files that a Dockerfile copies, as a tar."""

    digest: str
    """SHA-256 of its bytes, in hexadecimal."""
    open: Callable[[], Awaitable[AsyncIterator[bytes]]]
    """Its bytes; as often as needed."""


@dataclass(frozen=True)
class Material:
    """What the build of an image is given beside its template."""

    auth: RegistryAuth | None = None
    context: BuildContext | None = None


NO_MATERIAL = Material()


class Environments(Protocol):
    """
    Directories of Python packages on a node, read-only in every instance at `inside(name)`. They
    are shared by all replicas of the node, and never change: another set is another directory.
    """

    async def check(self) -> None:
        """Raise `PermanentError` when nothing can be installed on this node."""

    async def interpreter(self, template: Template) -> Interpreter:
        """
        What a template's interpreter says of itself, and of which image it is. Raises
        `PermanentError` when it says nothing that makes sense.
        """

    def downloads(self) -> AbstractAsyncContextManager[Path]:
        """A directory on the node's disk for what one installation downloads, while it runs."""

    async def find(self, key: str, *, since: datetime | None) -> PackageSet | None:
        """
        What a set came to, if it was looked up since then and is there still; it counts as used
        now.
        """

    async def install(self, spec: InstallSpec) -> PackageSet:
        """
        Install, whatever is there already; all or nothing. Raises `PermanentError` with code
        `dependency_failed`.
        """

    async def use(self, name: str) -> bool:
        """Whether an environment is there; it counts as used now."""

    async def listed(self) -> list[EnvironmentInfo]:
        """All environments, that which was used last at the end."""

    async def remove(self, name: str, *, unless_used_since: datetime) -> bool: ...

    async def write_log(self, session_id: str, text: bytes) -> None:
        """Keep the log of a session's installation, in place of what was there."""

    async def read_log(self, session_id: str) -> bytes | None: ...

    async def forget(self, before: datetime) -> None:
        """Drop logs, and what is known of sets, of before that time."""

    def inside(self, name: str) -> str:
        """Its path in an instance."""


class Driver(Protocol):
    """
    Every method may be called twice, may be cancelled at any await, and must leave the node such
    that calling it once more finishes the work. Gone is an observation, not an error.
    """

    kind: str
    capabilities: Capabilities

    @property
    def environments(self) -> Environments: ...

    @property
    def places(self) -> Places: ...

    async def open(self) -> None: ...

    async def close(self) -> None:
        """Let go of the node; instances that are not ephemeral stay."""

    async def check(self, template: Template) -> None:
        """
        Raise `InvalidRequest` when this node cannot make instances of the template as it demands.
        """

    async def built(self, template: Template) -> bool:
        """Whether all that its instances need is on this node."""

    def image_layer(self, template: Template, *, fresh: str = "") -> Layer | None:
        """
        The layer that is the template's image, like no other with another `fresh`; none where
        templates are directories of the node.
        """

    async def image(self, template: Template) -> ImageInfo | None:
        """What is to be recorded of its image, which is there; none where it has none."""

    async def build(
        self,
        template: Template,
        *,
        timeout: timedelta,
        say: Callable[[bytes], None],
        material: Material = NO_MATERIAL,
    ) -> None:
        """
        Make what `built` misses, telling what is printed on the way. Raises `PermanentError`, with
        code `build_failed` or one that says more, or `TemporaryError` when the same may go well
        later. No other call may build the same at the same time.
        """

    async def layers(self) -> list[str]:
        """Names of the layers of templates on this node, whole or not."""

    async def discard_layer(self, name: str) -> None:
        """Remove a layer that no template needs; nothing happens when it is not there."""

    async def ensure(self, spec: InstanceSpec) -> Handle:
        """An instance as described; the one that is there already, when there is one."""

    async def observe(self, handle: Handle) -> Observation: ...

    async def connect(self, handle: Handle) -> Link:
        """A link to the executor, which is ready to run."""

    async def resize(self, handle: Handle, resources: Resources) -> bool:
        """Set other limits on a running instance; whether that can be done without a new one."""

    def run_limits(
        self, handle: Handle, resources: Resources
    ) -> tuple[dict[str, int], dict[str, int]]:
        """
        What the executor of an instance must limit for us: rlimits by name, and what it has to
        watch.
        """

    async def out_of_memory(self, handle: Handle) -> bool:
        """Whether the kernel ended a process for memory since this was last asked."""

    async def memory_used(self, handle: Handle) -> int | None:
        """Bytes of memory that an instance has, user code or not; none where that is not known."""

    async def pause(self, handle: Handle) -> None:
        """
        Let all its processes stand still where they are; memory stays, CPU time is not used. The
        same when it stands still already. Without the feature `pause`, `Conflict` with code
        `pause_unavailable`; when it is gone, nothing happens.
        """

    async def resume(self, handle: Handle) -> None:
        """Let one that stands still go on; nothing happens when it does not, or is gone."""

    async def stop(self, handle: Handle, *, grace: timedelta) -> None:
        """End it, paused or not; what user code runs is asked to end first."""

    async def destroy(self, handle: Handle) -> None:
        """Remove the instance and all it took, except its workspace."""

    async def discard(self, workspace: str) -> None:
        """Remove a workspace."""

    async def copy(self, workspace: str, name: str) -> bool:
        """
        Make a workspace `name` with the files of `workspace`, whose instance is gone or stands
        still with all written down; whole or not at all. False when that cannot be done here.
        """

    async def handles(self) -> list[Handle]:
        """What is really there, for recovery."""

    async def workspaces(self) -> list[str]: ...

    async def health(self) -> str | None:
        """Why no instance can be made here at the moment, as far as is known; none if one can."""

    async def metrics(self) -> NodeMetrics: ...

    def workspace_of(self, handle: Handle) -> str: ...
