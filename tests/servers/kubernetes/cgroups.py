"""Control groups for the pods of a node, in both versions of control groups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

TOP = Path("/sys/fs/cgroup")


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
    unified = top / "cgroup.controllers"
    found = unified.read_text().split() if unified.exists() else []
    # Links, as from `cpu` to `cpu,cpuacct`, lead to the same directories.
    hierarchies = [
        path.name
        for path in sorted(top.iterdir())
        if path.is_dir() and not path.is_symlink() and path.name != "unified"
    ]
    for step in plan(group, hierarchies=[] if found else hierarchies, controllers=found):
        path = top / step.path
        if step.source is not None:
            path.write_text((top / step.source).read_text())
        elif step.text is not None:
            path.write_text(step.text)
        else:
            path.mkdir(exist_ok=True)
