"""Features of the machine are checked by using them, and the checks leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.drivers.local import host_checks
from atoll.drivers.shared import disk_images, mount_syscalls
from atoll.settings import LocalSettings


@pytest.fixture(autouse=True)
def clear_known_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_images, "_image_troubles", {})


def failing(path: Path, words: str) -> str:
    path.write_text(f"import sys; sys.exit({words!r})")
    return str(path)


privileged = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@privileged
def test_a_machine_that_cannot_mount_reports_the_reason_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node = tmp_path / "node"
    node.mkdir()
    program = failing(
        tmp_path / "mount_syscalls.py", "mounting /dev/loop0: Operation not permitted"
    )
    monkeypatch.setattr(mount_syscalls, "__file__", program)

    assert disk_images.images_problem(node) == "mounting /dev/loop0: Operation not permitted"
    assert list(node.iterdir()) == []
    (check,) = [
        c for c in host_checks.checks(LocalSettings(), node) if c.requirement == "disk_quota"
    ]
    assert not check.ok
    assert "Operation not permitted" in check.detail


@privileged
def test_a_file_system_that_cannot_be_mounted_is_detected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Really: the program that makes it makes nothing."""
    monkeypatch.setattr(disk_images, "MKFS", "/bin/true")
    assert disk_images.images_problem(tmp_path) is not None


@privileged
def test_the_check_of_a_machine_runs_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = disk_images.images_problem(tmp_path)
    monkeypatch.setattr(mount_syscalls, "__file__", failing(tmp_path / "mount.py", "no"))
    assert disk_images.images_problem(tmp_path / "not" / "yet" / "there") == first


def test_the_doctor_leaves_no_control_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpu memory pids")
    (root / "cgroup.subtree_control").touch()
    host_checks.checks(LocalSettings(cgroup_root=root), tmp_path)
    assert [path for path in root.iterdir() if path.is_dir()] == []


@privileged
@pytest.mark.parametrize(
    ("settings", "detail"),
    [
        (LocalSettings(), "are forks"),
        (LocalSettings(fork_server=False), "local.fork_server is false"),
        (LocalSettings(python=Path("/usr/bin/python3")), "local.python is another interpreter"),
    ],
    ids=["forks", "switched off", "another interpreter"],
)
def test_the_doctor_reports_why_instances_are_not_forks(
    tmp_path: Path, settings: LocalSettings, detail: str
) -> None:
    (check,) = [c for c in host_checks.checks(settings, tmp_path) if c.name == "fork server"]
    assert detail in check.detail
    assert check.ok == (detail == "are forks")
