"""Templates and their builds."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - `decode` reads the annotations

from atoll.sdk.values.sessions import Limits  # noqa: TC001


@dataclass(frozen=True, slots=True)
class SecurityContext:
    require: tuple[str, ...] = ()
    """What a node must be able to give; a node that cannot is not used."""


@dataclass(frozen=True, slots=True)
class RegistryInfo:
    """That a template has credentials, and for which registry."""

    server: str


@dataclass(frozen=True, slots=True)
class TemplateInfo:
    """What sessions start from."""

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
    """Ready instances that are kept at least."""
    pool_max: int | None = None
    """Ready instances that are kept at most; as the server's settings say when none."""
    debian_packages: tuple[str, ...] = ()
    python_packages: tuple[str, ...] = ()
    installed_packages: tuple[str, ...] = ()
    """The Python packages that these came to, as `name==version`."""
    runtime: str = ""
    dockerfile: str | None = None
    build_context: str | None = None
    """The digest of the files that the Dockerfile copies."""
    registry: RegistryInfo | None = None
    image_digest: str | None = None
    """Of the image in its registry, once it was pulled."""
    entrypoint: tuple[str, ...] | None = None
    """The image's own, once it is known; what runs is Atoll's executor."""
    command: tuple[str, ...] | None = None
    status: str = "ready"
    """pending, building, ready or failed; sessions start from the newest version that is ready."""
    message: str | None = None
    """Why the build failed, or what its last attempt came to."""
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class BuildEvent:
    """Something that a build printed, or a change of how it goes."""

    text: str | None = None
    status: str | None = None
    attempts: int = 0
    message: str | None = None
