"""Control groups in a tree of files that imitates the kernel."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from atoll.drivers.shared import cgroups
from atoll.model.resources import Resources

MiB = 1024 * 1024
CGROUPS = Path("/sys/fs/cgroup")
LIMITS = Resources(cpu=0.5, memory=64 * MiB, disk=MiB, max_processes=10)


def version_one(root: Path, *controllers: str) -> None:
    for controller in controllers:
        (root / controller).mkdir(parents=True)
        (root / controller / "cgroup.procs").touch()


def version_two(place: Path, controllers: str = "cpuset cpu io memory pids") -> None:
    place.mkdir(parents=True, exist_ok=True)
    (place / "cgroup.controllers").write_text(controllers)
    (place / "cgroup.subtree_control").touch()
    (place / "cgroup.procs").touch()


def test_version_one_uses_the_available_controllers(tmp_path: Path) -> None:
    version_one(tmp_path, "memory", "pids", "freezer")
    groups = cgroups.find(tmp_path, "atoll", "4:memory:/\n0::/\n")
    assert isinstance(groups, cgroups.CgroupV1)
    assert groups.provides == {"cgroup_memory", "cgroup_pids"}


def test_version_one_limits_user_code_apart_from_the_supervisor(tmp_path: Path) -> None:
    version_one(tmp_path, "memory", "cpu", "pids")
    (tmp_path / "memory/atoll/one/exec").mkdir(parents=True)
    (tmp_path / "memory/atoll/one/exec/memory.memsw.limit_in_bytes").touch()
    groups = cgroups.find(tmp_path, "atoll", "")
    groups.make("one", LIMITS)
    memory, cpu, pids = (tmp_path / name / "atoll/one" for name in ("memory", "cpu", "pids"))
    assert int((memory / "memory.limit_in_bytes").read_text()) == 64 * MiB + cgroups.OVERHEAD
    assert int((memory / "exec/memory.limit_in_bytes").read_text()) == 64 * MiB
    assert int((memory / "exec/memory.memsw.limit_in_bytes").read_text()) == 64 * MiB
    assert (cpu / "cpu.cfs_quota_us").read_text() == "50000"
    assert (cpu / "cpu.cfs_period_us").read_text() == "100000"
    assert not (cpu / "exec").exists()
    assert (pids / "exec/pids.max").read_text() == "11"
    assert (pids / "pids.max").read_text() == str(10 + cgroups.OWN_PROCESSES)


def test_version_one_limits_socket_buffers_beside_memory(tmp_path: Path) -> None:
    version_one(tmp_path, "memory")
    for group in ("one", "one/exec"):
        (tmp_path / "memory/atoll" / group).mkdir(parents=True)
        (tmp_path / "memory/atoll" / group / "memory.kmem.tcp.limit_in_bytes").touch()
    groups = cgroups.find(tmp_path, "atoll", "")
    assert not groups.limits_sockets
    (tmp_path / "memory/memory.kmem.tcp.limit_in_bytes").touch()
    groups = cgroups.find(tmp_path, "atoll", "")
    assert groups.limits_sockets
    groups.make("one", LIMITS)
    memory = tmp_path / "memory/atoll/one"
    whole = int((memory / "memory.kmem.tcp.limit_in_bytes").read_text())
    assert whole == (64 * MiB + cgroups.OVERHEAD) // 4
    assert int((memory / "exec/memory.kmem.tcp.limit_in_bytes").read_text()) == 16 * MiB


def test_version_one_assigns_each_process_to_its_group(tmp_path: Path) -> None:
    version_one(tmp_path, "memory", "cpu", "pids")
    groups = cgroups.find(tmp_path, "atoll", "")
    groups.make("one", LIMITS)
    assert sorted(groups.join_files("one")) == [
        str(tmp_path / name / "atoll/one/cgroup.procs") for name in ("cpu", "memory", "pids")
    ]
    groups.confine("one", 4242)
    assert (tmp_path / "memory/atoll/one/exec/cgroup.procs").read_text() == "4242"
    assert (tmp_path / "pids/atoll/one/exec/cgroup.procs").read_text() == "4242"


def test_version_one_counts_kills_and_lists_names(tmp_path: Path) -> None:
    version_one(tmp_path, "memory")
    groups = cgroups.find(tmp_path, "atoll", "")
    assert groups.names() == []
    groups.make("one", LIMITS)
    assert groups.memory_kills("one") == 0
    control = tmp_path / "memory/atoll/one/exec/memory.oom_control"
    control.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert groups.memory_kills("one") == 3
    assert groups.supervisor_kills("one") == 0
    (tmp_path / "memory/atoll/one/memory.oom_control").write_text("oom_kill 1\n")
    assert groups.supervisor_kills("one") == 1
    assert groups.names() == ["one"]
    assert groups.memory_kills("unknown") == 0


def test_version_one_freezes_the_supervisor_with_user_code(tmp_path: Path) -> None:
    version_one(tmp_path, "memory", "freezer")
    groups = cgroups.find(tmp_path, "atoll", "")
    assert groups.freezes
    groups.make("one", LIMITS)
    group = tmp_path / "freezer/atoll/one"
    assert str(group / "cgroup.procs") in groups.join_files("one")
    assert not (group / "exec").exists()
    (group / "cgroup.procs").touch()
    state = group / "freezer.state"
    state.write_text("THAWED\n")
    assert not groups.frozen("one")
    assert groups.freeze("one", 1)
    assert groups.frozen("one")
    state.write_text("FREEZING\n")
    assert groups.frozen("one")
    groups.thaw("one")
    assert state.read_text() == "THAWED"
    assert not groups.frozen("unknown")
    groups.thaw("unknown")
    assert not groups.freeze("unknown", 1)


def test_version_one_without_a_freezer_reports_that(tmp_path: Path) -> None:
    version_one(tmp_path, "memory")
    groups = cgroups.find(tmp_path, "atoll", "")
    groups.make("one", LIMITS)
    assert not groups.freezes
    assert not groups.frozen("one")
    groups.thaw("one")


def test_removing_missing_groups_is_silent(tmp_path: Path) -> None:
    version_one(tmp_path, "memory", "pids")
    groups = cgroups.find(tmp_path, "atoll", "")
    groups.remove("never")
    assert groups.processes("never") == []


def test_making_groups_twice_changes_nothing(tmp_path: Path) -> None:
    version_one(tmp_path, "memory", "cpu", "pids")
    groups = cgroups.find(tmp_path, "atoll", "")
    groups.make("one", LIMITS)
    groups.make("one", LIMITS)
    groups.limit("one", Resources(cpu=2, memory=128 * MiB, disk=MiB, max_processes=20))
    assert (tmp_path / "cpu/atoll/one/cpu.cfs_quota_us").read_text() == "200000"
    assert (tmp_path / "pids/atoll/one/exec/pids.max").read_text() == "21"


def test_a_tiny_cpu_share_is_raised_to_the_minimum_of_the_kernel(tmp_path: Path) -> None:
    version_one(tmp_path, "cpu")
    groups = cgroups.find(tmp_path, "atoll", "")
    groups.make("one", Resources(cpu=0.001, memory=MiB, disk=MiB, max_processes=4))
    assert int((tmp_path / "cpu/atoll/one/cpu.cfs_quota_us").read_text()) >= 1000


def test_version_two_is_used_before_version_one(tmp_path: Path) -> None:
    version_two(tmp_path)
    version_one(tmp_path, "memory")
    groups = cgroups.find(tmp_path, "atoll", "0::/user.slice\n")
    assert isinstance(groups, cgroups.CgroupV2)
    assert groups.provides == {"cgroup_memory", "cgroup_cpu", "cgroup_pids"}
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (tmp_path / "atoll").is_dir()


def test_version_two_keeps_processes_in_leaves(tmp_path: Path) -> None:
    version_two(tmp_path)
    groups = cgroups.find(tmp_path, "atoll", "0::/\n")
    (tmp_path / "atoll/one").mkdir()
    (tmp_path / "atoll/one/memory.swap.max").touch()
    groups.make("one", LIMITS)
    group = tmp_path / "atoll/one"
    assert groups.join_files("one") == [str(group / "supervisor/cgroup.procs")]
    assert (group / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert int((group / "memory.max").read_text()) == 64 * MiB + cgroups.OVERHEAD
    assert int((group / "exec/memory.max").read_text()) == 64 * MiB
    assert (group / "memory.swap.max").read_text() == "0"
    assert (group / "cpu.max").read_text() == "50000 100000"
    assert (group / "exec/pids.max").read_text() == "11"
    assert (group / "pids.max").read_text() == str(10 + cgroups.OWN_PROCESSES)
    groups.confine("one", 77)
    assert (group / "exec/cgroup.procs").read_text() == "77"
    (group / "exec/memory.events").write_text("low 0\noom 2\noom_kill 5\noom_group_kill 0\n")
    assert groups.memory_kills("one") == 5
    assert groups.supervisor_kills("one") == 0
    (group / "supervisor/memory.events").write_text("oom_kill 1\n")
    assert groups.supervisor_kills("one") == 1


def frozen_tree(tmp_path: Path) -> tuple[cgroups.ControlGroups, Path]:
    version_two(tmp_path)
    (tmp_path / "atoll").mkdir()
    (tmp_path / "atoll/cgroup.freeze").write_text("0\n")
    groups = cgroups.find(tmp_path, "atoll", "0::/\n")
    groups.make("one", LIMITS)
    group = tmp_path / "atoll/one"
    (group / "cgroup.freeze").write_text("0\n")
    (group / "cgroup.events").write_text("populated 1\nfrozen 0\n")
    return groups, group


def test_version_two_waits_until_all_processes_are_frozen(tmp_path: Path) -> None:
    groups, group = frozen_tree(tmp_path)
    assert groups.freezes
    assert not groups.frozen("one")
    over = threading.Event()
    kernel_thread = threading.Thread(target=_kernel, args=(group, over), daemon=True)
    kernel_thread.start()
    try:
        assert groups.freeze("one", 60)
    finally:
        over.set()
        kernel_thread.join()
    assert groups.frozen("one")
    groups.thaw("one")
    assert (group / "cgroup.freeze").read_text() == "0"
    assert not groups.freeze("unknown", 1)


def _kernel(group: Path, over: threading.Event) -> None:
    while not over.is_set():
        if (group / "cgroup.freeze").read_text() == "1":
            (group / "cgroup.events").write_text("populated 1\nfrozen 1\n")
            return


def test_an_instance_that_cannot_be_frozen_in_time_is_thawed(tmp_path: Path) -> None:
    groups, group = frozen_tree(tmp_path)
    assert not groups.freeze("one", 0.01)
    assert (group / "cgroup.freeze").read_text() == "0"


def test_version_two_of_an_old_kernel_has_no_freezer(tmp_path: Path) -> None:
    version_two(tmp_path)
    assert not cgroups.find(tmp_path, "atoll", "0::/\n").freezes


def test_version_two_lets_the_kernel_end_all_processes_at_once(tmp_path: Path) -> None:
    version_two(tmp_path)
    groups = cgroups.find(tmp_path, "atoll", "0::/\n")
    groups.make("one", LIMITS)
    group = tmp_path / "atoll/one"
    # Of a process without permission to signal it: used only if the kernel cannot end it.
    (group / "exec/cgroup.procs").write_text("0\n")
    assert not groups.kill("one")
    (group / "cgroup.kill").touch()
    cgroups.kill_all(groups, "one")
    assert (group / "cgroup.kill").read_text() == "1"
    assert not groups.kill("unknown")


@pytest.mark.parametrize("refused", ["cpu", "memory", "pids"])
def test_version_two_continues_without_a_controller_that_the_kernel_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    version_two(tmp_path)
    wrote = Path.write_text

    def kernel(path: Path, text: str) -> int:
        if path.name == "cgroup.subtree_control" and refused in text:
            raise OSError(errno.EINVAL, "refused")
        return wrote(path, text)

    monkeypatch.setattr(Path, "write_text", kernel)
    groups = cgroups.find(tmp_path, "atoll", "0::/\n")
    left = {"cpu", "memory", "pids"} - {refused}
    assert groups.provides == {f"cgroup_{controller}" for controller in left}
    groups.make("one", LIMITS)
    limit = {"cpu": "cpu.max", "memory": "memory.max", "pids": "pids.max"}
    group = tmp_path / "atoll/one"
    assert {name for name, file in limit.items() if (group / file).exists()} == left


def test_version_two_is_not_used_in_a_group_with_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version_two(tmp_path)

    def kernel(path: Path, text: str) -> int:
        raise OSError(errno.EBUSY, str(path))

    monkeypatch.setattr(Path, "write_text", kernel)
    assert cgroups.find(tmp_path, "atoll", "0::/\n").provides == frozenset()


def test_without_controllers_in_version_two_version_one_is_used(tmp_path: Path) -> None:
    version_two(tmp_path, "cpuset io")
    version_one(tmp_path, "memory")
    assert isinstance(cgroups.find(tmp_path, "atoll", "0::/\n"), cgroups.CgroupV1)


def test_a_host_without_control_groups_reports_that(tmp_path: Path) -> None:
    groups = cgroups.find(tmp_path, "atoll", "")
    assert groups.provides == frozenset()
    groups.make("one", LIMITS)
    assert (groups.join_files("one"), groups.processes("one"), groups.names()) == ([], [], [])
    assert groups.memory_kills("one") == 0
    groups.remove("one")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_user_gets_the_highest_delegated_group(tmp_path: Path) -> None:
    session = tmp_path / "user.slice/user-1.slice/session.scope"
    for directory in (
        tmp_path,
        tmp_path / "user.slice",
        tmp_path / "user.slice/user-1.slice",
        session,
    ):
        version_two(directory)
    for directory in (tmp_path, tmp_path / "user.slice"):
        (directory / "cgroup.subtree_control").chmod(0o444)
    own = "0::/user.slice/user-1.slice/session.scope\n"
    groups = cgroups.find(tmp_path, "atoll", own)
    assert isinstance(groups, cgroups.CgroupV2)
    assert (tmp_path / "user.slice/user-1.slice/atoll").is_dir()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_group_into_which_no_process_can_be_moved_is_not_delegated(tmp_path: Path) -> None:
    scope = tmp_path / "session.scope"
    for directory in (tmp_path, scope):
        version_two(directory)
    (tmp_path / "cgroup.subtree_control").chmod(0o444)
    (scope / "cgroup.procs").chmod(0o444)
    assert cgroups.find(tmp_path, "atoll", "0::/session.scope\n").provides == frozenset()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_group_removed_while_it_is_read_counts_as_missing(tmp_path: Path) -> None:
    real = next(
        (place for place in (CGROUPS / "memory", CGROUPS) if (place / "cgroup.procs").exists()),
        None,
    )
    if real is None:
        pytest.skip("there are no control groups here")
    group = real / f"atoll-test-{os.getpid()}"
    group.mkdir()
    try:
        procs = (group / "cgroup.procs").open()
    finally:
        group.rmdir()
    with procs:
        version_one(tmp_path, "memory")
        groups = cgroups.find(tmp_path, "atoll", "")
        mine = tmp_path / "memory/atoll/one"
        mine.mkdir(parents=True)
        for name in ("cgroup.procs", "memory.oom_control", "memory.usage_in_bytes"):
            (mine / name).symlink_to(f"/proc/self/fd/{procs.fileno()}")
        with pytest.raises(OSError, match="No such device"):
            (mine / "cgroup.procs").read_text()
        assert groups.processes("one") == []
        assert groups.supervisor_kills("one") == 0
        assert groups.memory_used("one") is None
