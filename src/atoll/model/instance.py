"""One incarnation of a session's compute on one node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from atoll.model.resources import Resources
from atoll.model.session import Cause
from atoll.model.template import Template
from atoll.model.volume import Volume, VolumeMount


@dataclass(frozen=True, slots=True)
class Handle:
    """
    How a driver finds an instance again. Small, versioned and stored; only the driver reads `data`.
    """

    instance_id: str
    driver: str
    version: int
    data: dict[str, str | int]


@dataclass(frozen=True, slots=True)
class Callback:
    """Where an executor sends callbacks, and with which token."""

    url: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """What a driver needs to create an instance."""

    instance_id: str
    template: Template
    resources: Resources
    workspace: str | None = None
    """An existing workspace to use; a new one is created if this is None."""
    ephemeral: bool = False
    """Whether the instance must end with the process that created it."""
    callback: Callback | None = None
    """None if the executor uses its link only."""
    volumes: tuple[tuple[Volume, VolumeMount], ...] = ()
    prefix: str | None = None
    """The workspace's prefix in the bucket of the blob store; None if it is on the node's disk."""
    session_id: str | None = None
    """The session that it is made for; None for the warm pool."""
    on_delay: Callable[[str], None] | None = None
    """Called with the reason, in the node's own words, while the instance cannot start yet."""


class State(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    EXITED = "exited"
    GONE = "gone"
    UNKNOWN = "unknown"
    """The driver cannot determine it at the moment; the instance may well be running."""


@dataclass(frozen=True, slots=True)
class Observation:
    state: State
    cause: Cause | None = None
    """Why it has ended, or why it is about to end while it still runs."""
    message: str | None = None
    """The node's own words for the cause, if it has any."""


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance as stored; `session_id` is null while it is in a warm pool."""

    id: str
    node_id: str
    template_id: str
    template_version: int
    workspace: str
    handle: Handle
    created_at: datetime
    session_id: str | None = None
    holder: str | None = None
    """The replica in whose warm pool it is."""


FEATURES = {
    "pause": "instances can be paused and resumed, and keep their memory",
    "copy": "workspaces are copied on the node; file systems that support it share blocks",
    "image": "templates are images, given by name or built from a Dockerfile",
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a node can give its instances."""

    provides: frozenset[str]
    """Names of `template.REQUIREMENTS`."""
    missing: dict[str, str] = field(default_factory=dict)
    """The other names of `template.REQUIREMENTS`: what each means, and why it is missing."""
    unavailable: dict[str, str] = field(default_factory=dict)
    """Why the node does not have an optional part of the driver, by the part's name."""
