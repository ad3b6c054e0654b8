"""Templates: what a session starts from."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from atoll.model.image import ImageInfo, Registry
from atoll.model.resources import Resources

DEFAULT_TEMPLATE = "python"
BASE_TEMPLATE = "template:"
"""Prefix of a `base_image` that is the root file system of another template."""
MAX_DEBIAN_PACKAGES = 200
"""Per template."""

MAX_DOCKERFILE = 65_536
"""Characters."""
IMAGE = "image"
"""The feature of nodes whose instances are created from images."""

REQUIREMENTS = {
    "own_uid": "each instance has a host uid of its own",
    "cgroup_memory": "memory is limited by a control group",
    "cgroup_cpu": "CPU time is limited by a control group",
    "cgroup_pids": "the number of processes is limited by a control group",
    "disk_quota": "the workspace's size is limited by its file system",
    "seccomp": "system calls are filtered",
    "no_network": "instances can connect to nothing outside",
}
"""Names for `security_context.require`: a node that lacks one refuses the template."""


class TemplateStatus(StrEnum):
    PENDING = "pending"
    """To be built or retried."""
    BUILDING = "building"
    READY = "ready"
    FAILED = "failed"

    @property
    def settled(self) -> bool:
        return self in (TemplateStatus.READY, TemplateStatus.FAILED)


@dataclass(frozen=True, slots=True)
class Layer:
    """
    Debian packages on top of a root file system, or an image. Built by each node that lacks it.
    """

    name: str
    """A digest of all its inputs: equal for templates with equal inputs."""
    packages: tuple[str, ...] = ()
    image: bool = False
    """Whether it is an image, pulled or built from a Dockerfile."""


@dataclass(frozen=True, slots=True)
class Build:
    """What is added to a template's base, and the state of its build."""

    debian_packages: tuple[str, ...] = ()
    """By name, or as `name=version`."""
    python_packages: tuple[str, ...] = ()
    """Requirements (PEP 508), including those of the template that it is based on."""
    root: str = ""
    """The base: a root file system directory or an image; empty for the node's own."""
    layers: tuple[Layer, ...] = ()
    """Layers on the base, lowest first; the last one belongs to this build."""
    environment: str | None = None
    """The driver's name for the directory with the Python packages, once it exists."""
    installed: tuple[str, ...] = ()
    """The Python packages in it, as `name==version`."""
    image: ImageInfo | None = None
    """The image, once it exists; null for a directory."""
    anew: bool = False
    """Whether to resolve packages again, ignoring the cached result."""
    attempts: int = 0
    retry_at: datetime | None = None
    """When the build is retried after a temporary failure."""
    message: str | None = None
    """Why it failed, or the result of the last attempt."""


@dataclass(frozen=True, slots=True)
class Template:
    """
    One version of a template. The newest is the template itself; previous ones are kept for the
    sessions that started from them.
    """

    id: str
    name: str
    created_at: datetime
    updated_at: datetime
    default_resources: Resources
    image: str = ""
    """Root file system directory, or an image by name; empty for the node's own."""
    base_image: str = ""
    require: tuple[str, ...] = ()
    """Names of `REQUIREMENTS`; `security_context.require` on the wire."""
    python: str = ""
    """
    Interpreter inside: a path on this machine when `image` is empty, else a path in the image.
    """
    preload: tuple[str, ...] = ()
    """Modules that the zygote imports before it forks."""
    env: dict[str, str] = field(default_factory=dict)
    pool_size: int = 0
    """Minimum number of ready instances."""
    pool_max: int | None = None
    """Maximum number of ready instances under demand; the setting's value if null."""
    runtime: str = ""
    """The engine's name of the OCI runtime; empty for the node's default."""
    dockerfile: str = ""
    """The Dockerfile that its image is built from, instead of a named image."""
    build_context: str | None = None
    """Digest (SHA-256) of the tar with the files that the Dockerfile copies."""
    registry: Registry | None = None
    """Credentials to pull its image or the base of that."""
    number: int = 1
    """The number of this version, increased whenever the template is replaced or rebuilt."""
    status: TemplateStatus = TemplateStatus.READY
    build: Build | None = None
    """Null if there is nothing to build."""
    version: int = 1

    @property
    def edition(self) -> tuple[str, datetime, int]:
        """Identifies this version, also if the template is deleted and created again."""
        return self.id, self.created_at, self.number

    @property
    def root(self) -> str:
        """Root file system directory or image, without layers."""
        return self.image or (self.build.root if self.build is not None else "")

    @property
    def layers(self) -> tuple[Layer, ...]:
        return () if self.build is None else self.build.layers

    @property
    def features(self) -> frozenset[str]:
        """Features that a node needs for its instances."""
        found = {IMAGE} if any(layer.image for layer in self.layers) else set()
        return frozenset(found | ({runtime_feature(self.runtime)} if self.runtime else set()))


def runtime_feature(name: str) -> str:
    """The feature of nodes that have this OCI runtime."""
    return f"runtime.{name}"
