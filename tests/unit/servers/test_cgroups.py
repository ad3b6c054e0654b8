"""Control groups of a node, where this machine may have the other version."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.servers.kubernetes import cgroups
from tests.servers.kubernetes.cgroups import Step

GROUP = Path("cluster/n1")


def test_version_two_enables_each_controller_on_the_way_to_the_group() -> None:
    steps = cgroups.plan(GROUP, hierarchies=(), controllers=("cpu", "memory"))
    assert steps == [
        Step(Path("cgroup.subtree_control"), "+cpu +memory"),
        Step(Path("cluster")),
        Step(Path("cluster/cgroup.subtree_control"), "+cpu +memory"),
        Step(Path("cluster/n1")),
    ]


def test_version_one_makes_the_group_in_each_hierarchy() -> None:
    steps = cgroups.plan(GROUP, hierarchies=("memory", "cpuset"), controllers=())
    assert [step.path for step in steps if step.source is None] == [
        Path("memory/cluster"),
        Path("memory/cluster/n1"),
        Path("cpuset/cluster"),
        Path("cpuset/cluster/n1"),
    ]
    copied = {step.path: step.source for step in steps if step.source is not None}
    assert copied[Path("cpuset/cluster/n1/cpuset.cpus")] == Path("cpuset/cluster/cpuset.cpus")
    assert copied[Path("cpuset/cluster/cpuset.mems")] == Path("cpuset/cpuset.mems")


def test_a_hybrid_machine_counts_as_version_one(tmp_path: Path) -> None:
    for name in ("memory", "unified", "cpu,cpuacct"):
        (tmp_path / name).mkdir()
    (tmp_path / "unified/cgroup.controllers").write_text("")
    (tmp_path / "cpu").symlink_to("cpu,cpuacct")
    cgroups.make(GROUP, tmp_path)
    made = {str(path.parent.parent.name) for path in tmp_path.glob("*/cluster/n1")}
    assert made == {"memory", "cpu,cpuacct", "cpu"}
    assert not (tmp_path / "unified/cluster").exists()


def test_version_two_is_found_by_its_controllers(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory pids\n")
    (tmp_path / "system.slice").mkdir()
    cgroups.make(GROUP, tmp_path)
    assert (tmp_path / GROUP).is_dir()
    for group in (tmp_path, tmp_path / "cluster"):
        assert (group / "cgroup.subtree_control").read_text() == "+cpuset +cpu +memory +pids"
    assert not (tmp_path / "system.slice/cluster").exists()


def test_processes_leave_a_container_s_top_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory")
    (tmp_path / "cgroup.procs").write_text("1\n7\n")
    moved: list[str] = []
    write = Path.write_text

    def kernel(path: Path, text: str) -> int:
        """A group that has processes cannot enable controllers for others."""
        if path == tmp_path / cgroups.OCCUPANTS / "cgroup.procs":
            moved.append(text)
            return len(text)
        if path == tmp_path / "cgroup.subtree_control" and moved != ["1", "7"]:
            raise OSError(errno.EBUSY, "Device or resource busy")
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", kernel)
    cgroups.make(GROUP, tmp_path)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"


def test_a_read_only_mount_is_a_missing_requirement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup.controllers").write_text("memory")

    def refuse(path: Path, text: str) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.delenv("TEST_REQUIRE_ALL", raising=False)
    with pytest.raises(pytest.skip.Exception, match="Read-only"):
        cgroups.make(GROUP, tmp_path)
