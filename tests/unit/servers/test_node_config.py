"""What containerd and kubelet of a node must agree on."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.servers.kubernetes import node_config
from tests.servers.kubernetes.network import Network
from tests.servers.kubernetes.pki import Authority


@pytest.fixture(params=["overlayfs", "native"])
def snapshotter(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def written(tmp_path: Path, snapshotter: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a node; the machine's plugins are not needed."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins/bridge").touch()
    monkeypatch.setattr(node_config, "CNI_PLACES", (str(tmp_path / "plugins"),))
    network = Network(0)
    node = node_config.Node("n1", 1, tmp_path / "n1", "cluster/n1", snapshotter)
    node_config.write(node, network, Authority(tmp_path / "pki", f"https://{network.host}:6443"))
    return node.place


def cri(place: Path) -> dict[str, Any]:
    config = tomllib.loads((place / "containerd.toml").read_text())
    found: dict[str, Any] = config["plugins"]["io.containerd.grpc.v1.cri"]
    return found


def test_kubelet_and_containerd_use_cgroupfs_whether_or_not_the_machine_has_systemd(
    written: Path,
) -> None:
    # It is what works in both versions of control groups without a systemd in the node.
    kubelet = json.loads((written / "kubelet.json").read_text())
    assert (kubelet["cgroupDriver"], kubelet["cgroupRoot"]) == ("cgroupfs", "/cluster/n1")
    runtimes = cri(written)["containerd"]["runtimes"]
    assert {name: runtime["options"]["SystemdCgroup"] for name, runtime in runtimes.items()} == {
        "runc": False,
        **dict.fromkeys(node_config.RUNTIMES, False),
    }


def test_version_one_of_control_groups_is_accepted(written: Path) -> None:
    assert json.loads((written / "kubelet.json").read_text())["failCgroupV1"] is False


def test_pods_use_the_snapshotter_that_works_here(written: Path, snapshotter: str) -> None:
    assert cri(written)["containerd"]["snapshotter"] == snapshotter
