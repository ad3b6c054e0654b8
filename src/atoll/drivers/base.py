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

    ConnectionHandler = Callable[[StreamReader, StreamWriter], Awaitable[None]]
    """Serves a connection that was made inside the sandbox of an installation."""


class NotEmptied(Conflict):
    """A prefix of the bucket still has objects whose names cannot be listed."""

    code = "volume_not_emptied"


@dataclass(frozen=True)
class Wheel:
    """A wheel as downloaded from the index, in a file that no installation can write."""

    path: Path
    name: str
    """The file's name on the index."""
    digest: str
    """SHA-256, hexadecimal."""


@dataclass(frozen=True)
class InstallSpec:
    """What to install, and with which limits."""

    key: str
    """The key under which the result of this installation is stored."""
    template: Template
    requirements: tuple[str, ...]
    """Names, extras and specifiers, in the canonical form."""
    environment_name: Callable[[tuple[str, ...], tuple[str, ...]], str]
    """
    The name of an environment, from its packages (`name==version`) and the digests of the wheels
    that they were installed from.
    """
    resources: Resources
    serve_index: ConnectionHandler
    """The package index, as the sandbox of the installation reaches it."""
    wheels: Callable[[], list[Wheel]]
    """The wheels that `serve_index` has served: everything installed must come from them."""
    on_output: Callable[[bytes], None]
    template_packages: dict[str, str]
    """Versions by normalised name."""
    pinned: dict[str, str] = field(default_factory=dict)
    """Those of them whose versions may not change."""
    exact: bool = False
    """Whether the requirements are complete, with one version of each package."""
    source_builds: bool = False


@dataclass(frozen=True)
class RegistryAuth:
    """Credentials for pulling images: a user name and a password, or a token."""

    server: str
    username: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)


@dataclass(frozen=True)
class BuildFiles:
    """The files that a Dockerfile copies, as a tar."""

    digest: str
    """SHA-256 of the tar, in hexadecimal."""
    open: Callable[[], Awaitable[AsyncIterator[bytes]]]
    """Reads the tar; may be called more than once."""


@dataclass(frozen=True)
class ImageInputs:
    """What a build of an image needs beside the template."""

    auth: RegistryAuth | None = None
    files: BuildFiles | None = None


NO_INPUTS = ImageInputs()


class PackageEnvironments(Protocol):
    """
    Directories of Python packages on a node, read-only in every instance at `inside(name)`. All
    replicas of the node share them. An environment never changes: another set of packages is
    another environment.
    """

    async def check(self) -> None:
        """Raise `PermanentError` if packages cannot be installed on this node."""

    async def interpreter(self, template: Template) -> Interpreter:
        """
        The interpreter of a template's image: its version, platform and packages. Raises
        `PermanentError` if its description is not valid.
        """

    def downloads(self) -> AbstractAsyncContextManager[Path]:
        """A directory on the node's disk for the downloads of one installation."""

    async def find(self, key: str, *, since: datetime | None) -> PackageSet | None:
        """
        The recorded result of an installation, if it was recorded since then and its environment
        still exists. Marks the environment as used now.
        """

    async def install(self, spec: InstallSpec) -> PackageSet:
        """
        Install all packages of the spec, or nothing, even if they are there already. Raises
        `PermanentError` with code `dependency_failed`.
        """

    async def use(self, name: str) -> bool:
        """Whether an environment exists. Marks it as used now."""

    async def listed(self) -> list[EnvironmentInfo]:
        """All environments; the most recently used one is the last."""

    async def remove(self, name: str, *, unless_used_since: datetime) -> bool:
        """Remove an environment; False if it was used since then or does not exist."""

    async def write_log(self, session_id: str, text: bytes) -> None:
        """Replace the log of a session's installation."""

    async def read_log(self, session_id: str) -> bytes | None: ...

    async def forget(self, before: datetime) -> None:
        """Drop logs and recorded results that are older."""

    def inside(self, name: str) -> str:
        """The path of an environment in an instance."""


class Images(Protocol):
    """
    What the node's instances are made from beside the template itself: images, or layers on a root
    file system. Layers are named by what they are made from; templates share them.
    """

    @property
    def features(self) -> frozenset[str]:
        """Names of `instance.FEATURES` that concern images, and `runtime.` with each runtime."""

    async def is_built(self, template: Template) -> bool:
        """Whether the node has all that instances of the template need."""

    def image_layer(self, template: Template, *, fresh: str = "") -> Layer | None:
        """
        The layer that stands for the template's image; another value of `fresh` gives another
        layer. None on nodes whose templates are directories.
        """

    async def inspect(self, template: Template) -> ImageInfo | None:
        """What to record of the template's image, which is on the node; None if it has none."""

    async def build(
        self,
        template: Template,
        *,
        timeout: timedelta,
        on_output: Callable[[bytes], None],
        inputs: ImageInputs = NO_INPUTS,
    ) -> None:
        """
        Build everything that `is_built` requires; `on_output` receives the output. Raises
        `PermanentError` with code `build_failed` or a more specific one, or `TemporaryError` if a
        retry may succeed. The caller ensures that no other task builds the same layer on this node
        at the same time.
        """

    async def names(self) -> list[str]:
        """Names of all layers on this node, complete or not."""

    async def remove(self, name: str) -> None:
        """Remove a layer that no template needs, if it exists."""


class Volumes(Protocol):
    """Volumes of the node, and mounts of the blob store's bucket."""

    def bucket_problem(self) -> str | None:
        """Why this node cannot mount anything of the bucket; None if it can."""

    async def make(self, volume: Volume) -> None:
        """Make an empty volume; remove what is left of an earlier one of this name."""

    async def check(self, volume: Volume, *, read_only: bool) -> None:
        """
        Raise `InvalidRequest` with code `isolation_unavailable` or `mount_unavailable` if instances
        of this node cannot have the volume in this mode.
        """

    async def check_unused(self, volume: Volume) -> None:
        """Raise `Conflict` with code `volume_in_use` while an instance has the volume."""

    async def remove(self, volume: Volume) -> None:
        """Remove the volume and its files; `Conflict` as in `check_unused`."""

    async def broken(self) -> list[str]:
        """Ids of instances that have a mount which no longer answers."""

    async def discard(self, prefix: str) -> None:
        """Remove the files of a workspace in the bucket; no instance may have it mounted."""


class Workspaces(Protocol):
    """
    Workspaces on the node. `Driver.ensure` makes them and `Driver.destroy` keeps them: a workspace
    stays until it is discarded.
    """

    @property
    def can_copy(self) -> bool:
        """Whether `copy` can succeed on this node."""

    @property
    def outlive_instances(self) -> bool:
        """
        Whether a workspace stays on the node when its instance ends. Otherwise the only copy is a
        checkpoint.
        """

    def of(self, handle: Handle) -> str:
        """The name of the instance's workspace. Reads the handle alone."""

    async def names(self) -> list[str]: ...

    async def copy(self, name: str, new: str) -> bool:
        """
        Make workspace `new` with the files of workspace `name`, completely or not at all. The
        instance of `name` must be gone, or paused after a sync. False if this node cannot do it.
        """

    async def discard(self, name: str) -> None:
        """Remove a workspace, if it exists; no instance may have it."""


class Limits(Protocol):
    """
    What the executor of an instance must enforce, because the driver cannot; and the memory of an
    instance: its usage, and whether a process was killed because it ran out (`out_of_memory`).
    """

    def executor_limits(
        self, handle: Handle, resources: Resources
    ) -> tuple[dict[str, int], dict[str, int]]:
        """
        What the executor of an instance must enforce for every execution: rlimits by name, and
        limits that it has to watch. Pure: called for every execution.
        """

    async def out_of_memory(self, handle: Handle) -> bool:
        """Whether the kernel killed a process for lack of memory since the last call."""

    async def memory_used(self, handle: Handle) -> int | None:
        """Bytes of memory that an instance uses, the executor included; None if not known."""


class Pausing(Protocol):
    """Freezes instances: their memory stays, and they use no CPU time."""

    async def pause(self, handle: Handle) -> None:
        """
        Freeze all processes of the instance. Does nothing if it is paused already, or gone. Raises
        `TemporaryError` with code `pause_timeout` if a process cannot be frozen in time; then none
        is.
        """

    async def resume(self, handle: Handle) -> None:
        """Let a paused instance run again. Does nothing if it is not paused, or gone."""


class Resizing(Protocol):
    async def resize(self, handle: Handle, resources: Resources) -> bool:
        """Change the limits of a running instance; False if that takes a new instance."""


class Disruptions(Protocol):
    """Instances that the node ends for reasons of its own, such as an eviction."""

    def subscribe(self, observer: Callable[[Handle], None]) -> None:
        """
        Call `observer` with each instance that is about to end, and with each that was lost with
        its machine. It must neither block nor raise, and may be called more than once.
        """


class Ownership(Protocol):
    """Shows at the node which session has an instance. Only people read it."""

    async def record(self, handle: Handle, session_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeStatus:
    problem: str | None
    """Why no instance can be made on the node at the moment; None if one can."""
    load: NodeMetrics


class Driver(Protocol):
    """
    Makes, watches and removes the instances of one node.

    Every method may be called twice, may be cancelled at any await, and must leave the node such
    that calling it once more finishes the work. Gone is an observation, not an error.

    Parts are known once `open` has returned, and do not change. One that is None does not exist on
    this node; `capabilities.unavailable` has the reason, by the name of the attribute.
    """

    kind: str
    capabilities: Capabilities

    # Every node has these parts: instances are made from something, have files, and are limited.

    @property
    def images(self) -> Images: ...

    @property
    def workspaces(self) -> Workspaces: ...

    @property
    def limits(self) -> Limits: ...

    # Optional parts

    @property
    def packages(self) -> PackageEnvironments | None: ...

    @property
    def volumes(self) -> Volumes | None: ...

    @property
    def pausing(self) -> Pausing | None: ...

    @property
    def resizing(self) -> Resizing | None: ...

    @property
    def disruptions(self) -> Disruptions | None: ...

    @property
    def ownership(self) -> Ownership | None: ...

    async def open(self) -> None: ...

    async def close(self) -> None:
        """Release the node; instances that are not ephemeral stay."""

    async def check(self, template: Template) -> None:
        """
        Raise `InvalidRequest` if this node cannot give instances of the template what it requires.
        """

    async def ensure(self, spec: InstanceSpec) -> Handle:
        """
        Make the instance, and its workspace if the spec names none; return the existing one if
        there is one.
        """

    async def observe(self, handle: Handle) -> Observation: ...

    async def connect(self, handle: Handle) -> Link:
        """A link to the executor, which is ready to run."""

    async def stop(self, handle: Handle, *, grace: timedelta) -> None:
        """End the instance, paused or not; the executor is asked to shut down first."""

    async def destroy(self, handle: Handle) -> None:
        """Remove the instance and all that belongs to it, except its workspace."""

    async def handles(self) -> list[Handle]:
        """All instances that really are on the node, for recovery."""

    async def status(self) -> NodeStatus: ...
