"""Configuration of what runs on a node: containerd, CNI, kubelet and kube-proxy."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.missing import missing
from tests.servers.kubernetes import runsc
from tests.servers.kubernetes.images import PAUSE
from tests.servers.kubernetes.network import Network
from tests.servers.kubernetes.pki import Authority

CONTAINERD = "/run/containerd/containerd.sock"
CNI_PLACES = ("/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni")
RUNSC = shutil.which("runsc")
RUNTIMES = ("plain", "gvisor") if RUNSC else ("plain",)
"""Runtime classes beside the default runtime. `plain` is the same one, runc, by another name."""
MAX_PODS = 250
MAX_PROCESSES = 1024
"""Of each pod."""
_CONTAINERD = """
version = 2
root = "{place}/containerd"
state = "/run/containerd/state"
disabled_plugins = [{disabled}]
[grpc]
  address = "{socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{place}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  # Root may lack the capability (CAP_SYS_RESOURCE) to protect processes from the OOM killer.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{plugins}"
    conf_dir = "{place}/cni"
"""
_RUNTIME = """
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.{name}.options]
      # As in kubelet.json. A node has no systemd, also where the machine has one.
      SystemdCgroup = false
      BinaryName = "{program}"
"""
_DISABLED = ("aufs", "btrfs", "devmapper", "zfs")


@dataclass(frozen=True)
class Node:
    """Who a node is, and where its files are."""

    name: str
    index: int
    place: Path
    cgroup: str
    snapshotter: str

    @property
    def kubelet(self) -> Path:
        """The root directory of its kubelet."""
        return self.place / "kubelet"


def write(node: Node, network: Network, authority: Authority) -> None:
    """Write the files that the commands below name."""
    (node.place / "cni").mkdir(parents=True)
    (node.place / "containerd.toml").write_text(_containerd(node))
    address = network.node(node.index)
    if RUNSC:
        words = (sys.executable, "-I", "-S", runsc.__file__, RUNSC)
        (node.place / "runsc").write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (node.place / "runsc").chmod(0o755)
    _write(node.place / "cni/10-bridge.conflist", _cni(node, network))
    _write(node.place / "kubelet.json", _kubelet(node, address, authority))
    _write(node.place / "proxy.json", _proxy(node, network, authority))


def containerd_command(node: Node) -> list[str]:
    return ["containerd", "--config", str(node.place / "containerd.toml")]


def kubelet_command(node: Node, hyperkube: Path, network: Network, kubeconfig: Path) -> list[str]:
    return [
        str(hyperkube), "kubelet", "--config", str(node.place / "kubelet.json"),
        "--kubeconfig", str(kubeconfig), "--root-dir", str(node.kubelet),
        "--cert-dir", str(node.kubelet / "pki"), "--hostname-override", node.name,
        "--node-ip", network.node(node.index),
    ]  # fmt: skip


def proxy_command(node: Node, hyperkube: Path) -> list[str]:
    return [str(hyperkube), "kube-proxy", "--config", str(node.place / "proxy.json")]


def _containerd(node: Node) -> str:
    plugins = next((path for path in CNI_PLACES if Path(path, "bridge").exists()), None)
    if plugins is None:
        missing("the CNI plugins are not installed (package containernetworking-plugins)")
    text = _CONTAINERD.format(
        place=node.place,
        socket=CONTAINERD,
        pause=PAUSE,
        plugins=plugins,
        snapshotter=node.snapshotter,
        disabled=", ".join(f'"io.containerd.snapshotter.v1.{name}"' for name in _DISABLED),
    )
    for name in ("runc", *RUNTIMES):
        program = node.place / "runsc" if name == "gvisor" else "runc"
        text += _RUNTIME.format(name=name, program=program)
    return text


def _cni(node: Node, network: Network) -> dict[str, Any]:
    ranges = [[{"subnet": network.node_pods(node.index)}]]
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(node.place / "ipam"),
            "ranges": ranges,
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]}


def _kubelet(node: Node, address: str, authority: Authority) -> dict[str, Any]:
    serving = authority.pair(f"{node.name}-server", node.name, address, subject=node.name)
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(authority.ca)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(serving.certificate),
        "tlsPrivateKeyFile": str(serving.key),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "enforceNodeAllocatable": ["pods"],
        "containerRuntimeEndpoint": f"unix://{CONTAINERD}",
        "podLogsDir": str(node.place / "pod-logs"),
        "resolvConf": "",
        "maxPods": MAX_PODS,
        "podPidsLimit": MAX_PROCESSES,
        "serializeImagePulls": False,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "kubeAPIQPS": 1000,
        "kubeAPIBurst": 2000,
        # Images that were imported cannot be pulled again: none is ever removed.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        "nodeStatusUpdateFrequency": "4s",
        # Renewed in a quarter of it.
        "nodeLeaseDurationSeconds": 8,
        "enableProfilingHandler": False,
    }


def _proxy(node: Node, network: Network, authority: Authority) -> dict[str, Any]:
    kubeconfig = authority.kubeconfig(f"{node.name}-proxy", subject="system:kube-proxy")
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "mode": "iptables",
        "clusterCIDR": network.pods,
        "hostnameOverride": node.name,
        # Sizes of connection tracking belong to the machine.
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": "0s",
            "tcpCloseWaitTimeout": "0s",
        },
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))
