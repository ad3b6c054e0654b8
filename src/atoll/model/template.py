"""What a session starts from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import datetime

    from atoll.model.resources import Resources

DEFAULT_TEMPLATE = "python"

REQUIREMENTS = {
    "own_uid": "each instance has a host uid of its own",
    "cgroup_memory": "memory is limited by a control group",
    "cgroup_cpu": "CPU time is limited by a control group",
    "cgroup_pids": "the number of processes is limited by a control group",
    "disk_quota": "the workspace's size is limited by its file system",
    "seccomp": "system calls are filtered",
}
"""What `security_context.require` may demand of a node: refused where the node cannot give it."""


@dataclass(frozen=True, slots=True)
class Template:
    id: str
    name: str
    created_at: datetime
    updated_at: datetime
    default_resources: Resources
    image: str = ""
    """Root file system directory; empty for the one built from this machine's /usr."""
    base_image: str = ""
    pre_installed_packages: tuple[str, ...] = ()
    """Python packages that the image has, by name; told, not installed."""
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
    """Ready instances to keep."""
    version: int = 1

    @property
    def edition(self) -> tuple[str, datetime]:
        """This one as it is: changed, or made again under its id, a template is another edition."""
        return self.id, self.updated_at
