"""When a server asks systemd for a control group, and how it settles in one."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from atoll.drivers.local import cgroup_delegation
from atoll.drivers.local.cgroup_delegation import Decision, Situation
from atoll.drivers.shared import cgroups

SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"
APP = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/atoll-7-ab.scope\n"
ALL = frozenset({"cgroup_memory", "cgroup_cpu", "cgroup_pids"})


@pytest.mark.parametrize(
    ("uid", "unified", "provides", "own", "expected"),
    [
        pytest.param(1000, True, frozenset(), SESSION, Decision.ASK, id="login session"),
        pytest.param(1000, True, frozenset(), "0::/\n", Decision.ASK, id="top of a namespace"),
        pytest.param(1000, True, frozenset(), APP, Decision.ASK, id="scope that is of no use"),
        pytest.param(0, True, frozenset(), SESSION, Decision.ROOT, id="root"),
        pytest.param(0, False, frozenset(), "4:memory:/\n", Decision.ROOT, id="root, version 1"),
        pytest.param(
            1000, False, frozenset(), f"4:memory:/\n{SESSION}", Decision.VERSION_ONE, id="hybrid"
        ),
        pytest.param(1000, True, ALL, APP, Decision.DELEGATED, id="delegated"),
        pytest.param(
            1000, True, ALL - {"cgroup_cpu"}, APP, Decision.DELEGATED, id="delegated without cpu"
        ),
        pytest.param(
            1000, True, frozenset(), "0::/system.slice/atoll.service\n", Decision.SERVICE,
            id="service",
        ),
        pytest.param(
            1000, True, ALL, "0::/system.slice/atoll.service/server\n", Decision.DELEGATED,
            id="service with a subgroup",
        ),
    ],
)  # fmt: skip
def test_systemd_is_asked_only_where_it_can_help(
    uid: int, unified: bool, provides: frozenset[str], own: str, expected: Decision
) -> None:
    assert cgroup_delegation.decide(Situation(uid, unified, provides, own)) is expected


def test_the_request_announces_the_number_of_its_elements() -> None:
    """busctl takes the number of elements before each array."""
    words = list(cgroup_delegation.request("atoll-7-ab.scope", 7, 5.0))
    assert words[:2] == ["--user", "--timeout=5"]
    given = words[words.index("ssa(sv)a(sa(sv))") + 1 :]
    assert given[:2] == ["atoll-7-ab.scope", "fail"]
    count, rest = int(given[2]), given[3:]
    properties: dict[str, list[str]] = {}
    for _ in range(count):
        name, kind, *rest = rest
        size = 1 + int(rest[0]) if kind.startswith("a") else 1
        properties[name], rest = [kind, *rest[:size]], rest[size:]
    assert rest == ["0"]
    assert properties["PIDs"] == ["au", "1", "7"]
    assert properties["Delegate"] == ["b", "true"]
    assert properties["CollectMode"] == ["s", "inactive-or-failed"]


class Kernel:
    """Refuses, as version 2 does, controllers below a group that has processes."""

    def __init__(self, own: Path) -> None:
        self.own = own
        self._wrote = Path.write_text

    def write(self, path: Path, text: str) -> int:
        if path.name == "cgroup.procs":
            self.own = path.parent
        if path.name == "cgroup.subtree_control" and path.parent == self.own:
            raise OSError(errno.EBUSY, str(path))
        return self._wrote(path, text)


def test_a_server_leaves_its_group_before_enabling_controllers_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the scope alone is delegated: the files of the groups above it are not ours."""
    scope = tmp_path / "user.slice/atoll-7-ab.scope"
    scope.mkdir(parents=True)
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    (scope / "cgroup.controllers").write_text("cpu memory pids")
    (scope / "cgroup.subtree_control").touch()
    (scope / "cgroup.procs").write_text("7")
    kernel = Kernel(scope)
    monkeypatch.setattr(Path, "write_text", lambda path, text: kernel.write(path, text))
    own = "0::/user.slice/atoll-7-ab.scope\n"
    assert cgroups.find(tmp_path, "atoll", own).provides == frozenset()

    cgroups.enter_leaf(tmp_path, own, 7)

    assert (scope / "server/cgroup.procs").read_text() == "7"
    groups = cgroups.find(tmp_path, "atoll", f"{own.strip()}/server\n")
    assert groups.provides == ALL
    assert (scope / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (scope / "atoll").is_dir()
