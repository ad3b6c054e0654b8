"""What a session starts from."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from atoll.model.image import ImageInfo, Registry
from atoll.model.resources import Resources

DEFAULT_TEMPLATE = "python"
BASE_TEMPLATE = "template:"
"""What a `base_image` begins with that is another template's root file system."""
MAX_DEBIAN_PACKAGES = 200
"""Debian packages that a template may name."""

MAX_DOCKERFILE = 65_536
"""Characters."""
IMAGE = "image"
"""Among the features of a node: its instances are made from images."""

REQUIREMENTS = {
    "own_uid": "each instance has a host uid of its own",
    "cgroup_memory": "memory is limited by a control group",
    "cgroup_cpu": "CPU time is limited by a control group",
    "cgroup_pids": "the number of processes is limited by a control group",
    "disk_quota": "the workspace's size is limited by its file system",
    "seccomp": "system calls are filtered",
}
"""What `security_context.require` may demand of a node: refused where the node cannot give it."""


class TemplateStatus(StrEnum):
    PENDING = "pending"
    """To be built, or to be tried again."""
    BUILDING = "building"
    READY = "ready"
    FAILED = "failed"

    @property
    def settled(self) -> bool:
        return self in (TemplateStatus.READY, TemplateStatus.FAILED)


@dataclass(frozen=True, slots=True)
class Layer:
    """
    Debian packages on top of a root file system, or an image; a node that lacks it makes it.
    """

    name: str
    """A digest of all that it is made from: the same for templates that ask for the same."""
    packages: tuple[str, ...] = ()
    image: bool = False
    """Whether it is an image: pulled, or built from a Dockerfile."""


@dataclass(frozen=True, slots=True)
class Build:
    """What is put on a template's base, and how far that has come."""

    debian_packages: tuple[str, ...] = ()
    """By name, or as `name=version`."""
    python_packages: tuple[str, ...] = ()
    """Requirements (PEP 508); those of a template that it is based on are among them."""
    root: str = ""
    """The base: a root file system directory or an image; empty for the node's own."""
    layers: tuple[Layer, ...] = ()
    """What lies on it, lowest first; the last is this build's own."""
    environment: str | None = None
    """The driver's name for the directory with the Python packages, once it is there."""
    installed: tuple[str, ...] = ()
    """The Python packages in it, as `name==version`."""
    image: ImageInfo | None = None
    """What is known of the image, once it is there; none of a directory."""
    anew: bool = False
    """Whether packages are looked up anew, whatever is remembered of the same request."""
    attempts: int = 0
    retry_at: datetime | None = None
    """When it is tried again, after a fault that may pass."""
    message: str | None = None
    """Why it failed, or what the last attempt came to."""


@dataclass(frozen=True, slots=True)
class Template:
    """
    One version of a template. The newest is the template itself; the others are kept for the
    sessions that began with them.
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
    """Ready instances to keep at least."""
    pool_max: int | None = None
    """Ready instances to keep at most, when many are created; as the settings say when none."""
    runtime: str = ""
    """OCI runtime of its instances, by the engine's name for it; empty for the node's choice."""
    dockerfile: str = ""
    """What its image is built from, in place of one that has a name."""
    build_context: str | None = None
    """Digest (SHA-256) of the tar with the files that the Dockerfile copies."""
    registry: Registry | None = None
    """By what right its image, or that image's base, is pulled."""
    number: int = 1
    """Which version it is: one more each time the template is replaced or built again."""
    status: TemplateStatus = TemplateStatus.READY
    build: Build | None = None
    """None of one that has nothing to be built."""
    version: int = 1

    @property
    def edition(self) -> tuple[str, datetime, int]:
        """This one as it is: replaced, or made again under its id, a template is another."""
        return self.id, self.created_at, self.number

    @property
    def root(self) -> str:
        """Root file system directory or image, without what was built on it."""
        return self.image or (self.build.root if self.build is not None else "")

    @property
    def layers(self) -> tuple[Layer, ...]:
        return () if self.build is None else self.build.layers

    @property
    def features(self) -> frozenset[str]:
        """What a node must be able to do to make its instances."""
        found = {IMAGE} if any(layer.image for layer in self.layers) else set()
        return frozenset(found | ({runtime_feature(self.runtime)} if self.runtime else set()))


def runtime_feature(name: str) -> str:
    """Among the features of a node: it has the OCI runtime of this name."""
    return f"runtime.{name}"
