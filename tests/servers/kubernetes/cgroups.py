"""Control groups for the pods of a node, in both versions of control groups."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.missing import missing

TOP = Path("/sys/fs/cgroup")
OCCUPANTS = "init"
"""The group for processes of a container's top group."""


class Step(NamedTuple):
    """Make a directory, or write the content of a file: a text, or that of another file."""

    path: Path
    text: str | None = None
    source: Path | None = None


def plan(group: Path, *, hierarchies: Sequence[str], controllers: Sequence[str]) -> list[Step]:
    """
    What to do for `group` to have every controller. `hierarchies` are those of version 1;
    without any, `controllers` are those of version 2. The paths are relative to the mount point.
    """
    steps = []
    groups = [*reversed(group.parents[:-1]), group]
    if not hierarchies:
        text = " ".join(f"+{name}" for name in controllers)
        for path in groups:
            steps += [Step(path.parent / "cgroup.subtree_control", text), Step(path)]
        return steps
    for hierarchy in hierarchies:
        for path in groups:
            place = Path(hierarchy, path)
            steps.append(Step(place))
            if "cpuset" in hierarchy.split(","):
                # Without these no process can be added.
                steps += [
                    Step(place / name, source=place.parent / name)
                    for name in ("cpuset.cpus", "cpuset.mems")
                ]
    return steps


def make(group: Path, top: Path = TOP) -> None:
    """Make `group` below `top`. Skips the test where that is read-only, as in a container."""
    unified = top / "cgroup.controllers"
    found = unified.read_text().split() if unified.exists() else []
    # Links, as from `cpu` to `cpu,cpuacct`, lead to the same directories.
    hierarchies = [
        path.name
        for path in sorted(top.iterdir())
        if path.is_dir() and not path.is_symlink() and path.name != "unified"
    ]
    try:
        for step in plan(group, hierarchies=[] if found else hierarchies, controllers=found):
            _perform(step, top)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        missing(f"control groups for a Kubernetes cluster cannot be made: {error}")


def _perform(step: Step, top: Path) -> None:
    path = top / step.path
    if step.source is not None:
        path.write_text((top / step.source).read_text())
    elif step.text is None:
        path.mkdir(exist_ok=True)
    else:
        try:
            path.write_text(step.text)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            _vacate(path.parent)
            path.write_text(step.text)


def _vacate(group: Path) -> None:
    """
    Move its processes to a group below it. In a container the top of version 2 is a usual group,
    which cannot both have processes and enable controllers for others.
    """
    inner = group / OCCUPANTS
    inner.mkdir(exist_ok=True)
    for pid in (group / "cgroup.procs").read_text().split():
        # It may have ended.
        with suppress(ProcessLookupError):
            (inner / "cgroup.procs").write_text(pid)
