"""Templates and their builds."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - `decode` reads the annotations

from atoll.sdk.values.sessions import Limits  # noqa: TC001


@dataclass(frozen=True, slots=True)
class SecurityContext:
    require: tuple[str, ...] = ()
    """Isolation that a node must provide to run sessions of the template."""


@dataclass(frozen=True, slots=True)
class RegistryInfo:
    """The registry that a template has credentials for."""

    server: str


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    """A template as the server returned it."""

    id: str
    name: str
    default_resources: Limits
    version: int
    created_at: datetime
    updated_at: datetime
    image: str = ""
    base_image: str = ""
    pre_installed_packages: tuple[str, ...] = ()
    security_context: SecurityContext = field(default_factory=SecurityContext)
    python: str = ""
    preload: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    pool_size: int = 0
    """Minimum of ready instances."""
    pool_max: int | None = None
    """Maximum of ready instances. None: the server's setting."""
    debian_packages: tuple[str, ...] = ()
    python_packages: tuple[str, ...] = ()
    installed_packages: tuple[str, ...] = ()
    """All installed Python packages, as `name==version`."""
    runtime: str = ""
    dockerfile: str | None = None
    build_context: str | None = None
    """Digest of the files that the Dockerfile copies."""
    registry: RegistryInfo | None = None
    image_digest: str | None = None
    """Digest of the image in its registry, after it was pulled."""
    entrypoint: tuple[str, ...] | None = None
    """Entry point of the image. Instances run Atoll's executor instead."""
    command: tuple[str, ...] | None = None
    status: str = "ready"
    """pending, building, ready or failed. Sessions start from the newest ready version."""
    message: str | None = None
    """Why the build, or its last attempt, failed."""
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """Output of a build, or a change of its status."""

    text: str | None = None
    status: str | None = None
    attempts: int = 0
    message: str | None = None
