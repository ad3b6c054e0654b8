"""Finds the control groups that this process may use."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.drivers.shared.cgroups.base import CONTROLLERS, ControlGroups
from atoll.drivers.shared.cgroups.files import write
from atoll.drivers.shared.cgroups.v1 import FREEZER, CgroupV1
from atoll.drivers.shared.cgroups.v2 import CgroupV2

if TYPE_CHECKING:
    from atoll.settings import LocalSettings

OWN_GROUP = Path("/proc/self/cgroup")
LEAF = "server"
"""The group of a server in a scope that was delegated to it."""


def node_groups(settings: LocalSettings, node: Path, own: str | None = None) -> ControlGroups:
    """
    The control groups of the instances of this node directory, which no other node uses. `own` is
    the text of /proc/self/cgroup.
    """
    if own is None:
        own = OWN_GROUP.read_text()
    tag = hashlib.sha256(str(node.resolve()).encode()).hexdigest()[:12]
    return find(settings.cgroup_root, f"{settings.cgroup_name}-{tag}", own)


def find(root: Path, name: str, own: str) -> ControlGroups:
    """
    The control groups that this process may use: version 2 if it has controllers, else those
    controllers of version 1 that are mounted and writable. `own` is the text of /proc/self/cgroup.
    """
    unified = root / "cgroup.controllers"
    if unified.exists():
        found = _version_two(root, name, own)
        if found is not None:
            return found
    usable = frozenset(
        controller
        for controller in (*CONTROLLERS, FREEZER)
        if (root / controller / "cgroup.procs").exists()
        and os.access(root / controller, os.W_OK | os.X_OK)
    )
    return CgroupV1(root, name, usable) if usable else ControlGroups()


def _version_two(root: Path, name: str, own: str) -> CgroupV2 | None:
    """Below the root for root, else below the highest of our groups that was delegated to us."""
    groups = [root]
    if not os.access(root / "cgroup.subtree_control", os.W_OK):
        here = root / own_path(own).strip("/")
        chain = [here, *here.parents]
        above = [p for p in chain if p == root or root in p.parents]
        groups = [p for p in reversed(above) if _delegated(p)]
    for group in groups:
        try:
            available = (group / "cgroup.controllers").read_text().split()
            controllers = _enabled(group, frozenset(CONTROLLERS) & frozenset(available))
            if not controllers:
                continue
            (group / name).mkdir(exist_ok=True)
        except OSError:
            continue  # Not delegated after all, or it has processes: try the group below.
        freezes = (group / name / "cgroup.freeze").exists()
        return CgroupV2(group / name, controllers, freezes=freezes)
    return None


def _delegated(group: Path) -> bool:
    """
    Whether groups can be made here. To move a process from our group to one below, the kernel
    requires write access to `cgroup.procs` of their common ancestor.
    """
    return all(
        os.access(group / name, os.W_OK) for name in ("cgroup.subtree_control", "cgroup.procs")
    )


def _enabled(group: Path, controllers: frozenset[str]) -> frozenset[str]:
    """
    Enable controllers for the groups below. The kernel refuses a list of controllers if it refuses
    one of them, as it does with cpu while real-time processes are in other groups.
    """
    control = group / "cgroup.subtree_control"
    try:
        write(control, " ".join(f"+{controller}" for controller in sorted(controllers)))
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise  # The group has processes.
    else:
        return controllers
    found = set()
    for controller in sorted(controllers):
        with contextlib.suppress(OSError):
            write(control, f"+{controller}")
            found.add(controller)
    return frozenset(found)


def own_path(own: str) -> str:
    """The group in the version 2 hierarchy, from the text of /proc/self/cgroup."""
    return next((line[3:] for line in own.splitlines() if line.startswith("0::")), "/")


def enter_leaf(root: Path, own: str, pid: int) -> None:
    """
    Move a process from its group to a leaf below. In version 2 a group that has processes cannot
    give controllers to the groups below it.
    """
    leaf = root / own_path(own).strip("/") / LEAF
    leaf.mkdir(exist_ok=True)
    write(leaf / "cgroup.procs", pid)
