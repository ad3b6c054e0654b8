"""
A CSI driver that mounts a bucket into pods, as operators of clusters install one.

    with bucket_driver(cluster, s3) as driver:
        claim = driver.claim(namespace)

`csi_node_plugin` is its program on the nodes.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.missing import missing
from tests.servers import program
from tests.servers.kubernetes import csi_node_plugin
from tests.servers.kubernetes.cluster import Cluster
from tests.servers.kubernetes.csi_node_plugin import NAME, Places
from tests.servers.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

TOP = Path(__file__).parents[3]
CLAIM = "bucket"
SUBPATHS = "volume-subpaths"
"""In paths at which a kubelet mounts directories of volumes for containers."""
COMPONENT = "bucket-driver"
"""Its name in the node's log files."""
CSI_DRIVER = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "CSIDriver",
    "spec": {
        "attachRequired": False,
        "fsGroupPolicy": "None",
    },
}


@contextmanager
def bucket_driver(cluster: Cluster, s3: S3Server) -> Iterator[BucketDriver]:
    """
    A driver that runs on all nodes; the nodes must reach the server. In the end all nodes must
    run, and the pods that use the driver must have been deleted; their end is awaited.
    """
    driver = BucketDriver(cluster, s3)
    cluster.create(CSI_DRIVER, NAME)
    try:
        driver.start(*cluster.nodes)
        yield driver
    finally:
        driver.remove()
        cluster.kubectl("delete", "csidriver", NAME)


class BucketDriver:
    def __init__(self, cluster: Cluster, s3: S3Server) -> None:
        program("s3fs", "s3fs")
        if not Path("/dev/fuse").exists():
            missing("/dev/fuse does not exist")
        assert cluster.network.host in s3.endpoint, "start S3Server with host=cluster.network.host"
        self.s3 = s3
        self._cluster = cluster
        self._volumes: list[str] = []

    def claim(self, namespace: str) -> str:
        """The name of a new claim in the namespace, whose volume is the bucket."""
        claim = {"namespace": namespace, "name": CLAIM}
        common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        volume = {
            **common,
            "capacity": {"storage": "1Gi"},
            "claimRef": claim,
            "csi": {"driver": NAME, "volumeHandle": namespace},
        }
        self._cluster.create(
            {"apiVersion": "v1", "kind": "PersistentVolume", "spec": volume}, namespace
        )
        self._volumes.append(namespace)
        wanted = {"requests": {"storage": "1Gi"}}
        self._cluster.create(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "spec": {**common, "volumeName": namespace, "resources": wanted},
            },
            CLAIM,
            namespace,
        )
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{CLAIM}"
        self._cluster.wait(
            lambda: self._cluster.ask("GET", path)["status"].get("phase") == "Bound", CLAIM
        )
        return CLAIM

    def start(self, *nodes: str) -> None:
        """Start it on nodes, and wait until their kubelets have registered it."""
        for name in nodes:
            places = self._places(name)
            places.directory.mkdir(parents=True, exist_ok=True)
            places.registered.unlink(missing_ok=True)
            places.passwords.touch(mode=0o600)
            places.passwords.write_text(f"{ACCESS_KEY}:{SECRET_KEY}\n")
            command = (
                "env", f"PYTHONPATH={TOP}", sys.executable, "-m", csi_node_plugin.__name__,
                name, str(places.kubelet), self.s3.endpoint, BUCKET,
            )  # fmt: skip
            node = self._cluster.nodes[name]
            node.install(COMPONENT, command)
            node.start(COMPONENT)
        for name in nodes:
            # A kubelet updates its CSINode before. That object is no sign of a second start,
            # because it does not change when a node is lost.
            self._cluster.wait(self._places(name).registered.exists, f"the driver on {name}")

    def kill(self, node: str) -> None:
        """Volumes that are mounted stay usable; no others can be mounted or unmounted."""
        self._cluster.nodes[node].signal(COMPONENT, signal.SIGKILL)

    def mounts(self, node: str) -> list[str]:
        """Where volumes of pods are mounted on a node, apart from directories of containers."""
        lines = Path(f"/proc/{self._cluster.nodes[node].pid}/mounts").read_text().splitlines()
        mounts = [line.split()[1:3] for line in lines]
        pods = self._cluster.nodes[node].kubelet / "pods"
        return [
            place
            for place, kind in mounts
            if kind == "fuse.s3fs" and Path(place).is_relative_to(pods) and SUBPATHS not in place
        ]

    def remove(self) -> None:
        """Remove it from all nodes, as soon as no pod uses it."""
        nodes = self._cluster.nodes
        self._cluster.wait(lambda: not any(map(self.mounts, nodes)), "the end of its volumes")
        for name in nodes:
            self.kill(name)
            # Its absence is what makes a kubelet forget the driver.
            self._places(name).registration_socket.unlink(missing_ok=True)
        for name in self._volumes:
            self._cluster.ask("DELETE", f"/api/v1/persistentvolumes/{name}")

    def _places(self, node: str) -> Places:
        return Places(self._cluster.nodes[node].kubelet)
