"""What an engine provides, from its answer to `GET /info`, and what depends on the storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.model.instance import Capabilities
from atoll.model.template import REQUIREMENTS

if TYPE_CHECKING:
    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.storage import Storage

NO_DIRECTORIES = "its workspaces are volumes of a Docker engine (ATOLL_DOCKER__STORAGE)"


def find_capabilities(engine: Engine, storage: Storage, *, packages: bool) -> Capabilities:
    """`packages` says whether package environments can be mounted."""
    info = engine.info
    has = {
        "cgroup_memory": bool(info.get("MemoryLimit")),
        "cgroup_cpu": bool(info.get("CpuCfsQuota")),
        "cgroup_pids": bool(info.get("PidsLimit")),
        "seccomp": engine.has_security_option("seccomp"),
        "disk_quota": storage.quota,
        "own_uid": True,
        "no_network": True,
    }
    missing = {name: text for name, text in REQUIREMENTS.items() if not has[name]}
    provides = frozenset(name for name, provided in has.items() if provided)
    unavailable = {}
    if info.get("CgroupDriver") == "none":
        unavailable["pausing"] = "the engine has no control groups"
    if not packages:
        unavailable["packages"] = NO_DIRECTORIES
    if storage.volumes is None:
        unavailable["volumes"] = NO_DIRECTORIES
    return Capabilities(provides, missing, unavailable)
