"""That pods get directories of a bucket by the CSI driver of the tests, and nodes lose them."""

from __future__ import annotations

import subprocess

import pytest

from tests.servers.kubernetes.bucket_driver import BucketDriver
from tests.servers.kubernetes.cluster import Cluster
from tests.servers.kubernetes.csi_node_plugin import NAME
from tests.servers.kubernetes.images import BARE

ANY_UID = 1234567
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": ANY_UID,
    "seccompProfile": {"type": "RuntimeDefault"},
}


class Pods:
    """Pods of a namespace, each with a directory of the bucket at /files."""

    def __init__(self, cluster: Cluster, namespace: str, claim: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._claim = claim

    def start(self, name: str, node: str, directory: str, *, read_only: bool = False) -> None:
        mount = {
            "name": "files", "mountPath": "/files", "subPath": directory, "readOnly": read_only
        }  # fmt: skip
        container = {
            "name": "c",
            "image": BARE,
            "command": ["sleep", "1000"],
            "securityContext": RESTRICTED,
            "volumeMounts": [mount],
        }
        spec = {
            "nodeName": node,
            "containers": [container],
            "volumes": [{"name": "files", "persistentVolumeClaim": {"claimName": self._claim}}],
            "terminationGracePeriodSeconds": 1,
        }
        manifest = {"apiVersion": "v1", "kind": "Pod", "spec": spec}
        self._cluster.create(manifest, name, self._namespace)
        self._cluster.wait_for_pod(self._namespace, name)

    def sh(self, name: str, script: str) -> str:
        inside = ("exec", "-n", self._namespace, name, "--", "sh", "-euc", script)
        return self._cluster.kubectl(*inside)

    def delete(self, name: str) -> None:
        """Wait until the kubelet has unmounted its volumes, too."""
        self._cluster.kubectl("delete", "pod", name, "-n", self._namespace)


@pytest.fixture
def pods(cluster: Cluster, namespace: str, bucket_volumes: BucketDriver) -> Pods:
    return Pods(cluster, namespace, bucket_volumes.claim(namespace))


def stored(driver: BucketDriver, key: str) -> bytes:
    return bytes(driver.s3.store().get(key).bytes())


def test_pods_of_any_uid_share_a_directory_of_the_bucket(
    cluster: Cluster, pods: Pods, bucket_volumes: BucketDriver, namespace: str
) -> None:
    for name in cluster.nodes:
        drivers = cluster.ask("GET", f"/apis/storage.k8s.io/v1/csinodes/{name}")["spec"]["drivers"]
        assert [(driver["name"], driver["nodeID"]) for driver in drivers] == [(NAME, name)]
    directory = f"mounts/{namespace}"
    pods.start("writer", "n1", directory)
    pods.sh("writer", "id -u > /files/uid; mkdir /files/d; mv /files/uid /files/d")
    assert stored(bucket_volumes, f"{directory}/d/uid") == b"1234567\n"

    pods.start("reader", "n2", directory, read_only=True)
    assert pods.sh("reader", "cat /files/d/uid") == "1234567\n"
    with pytest.raises(subprocess.CalledProcessError) as refused:
        pods.sh("reader", "echo more >> /files/d/uid")
    assert any("Read-only file system" in note for note in refused.value.__notes__)

    assert [len(bucket_volumes.mounts(name)) for name in cluster.nodes] == [1, 1]
    pods.delete("writer")
    pods.delete("reader")
    assert [bucket_volumes.mounts(name) for name in cluster.nodes] == [[], []]


def test_volumes_outlive_the_driver(
    pods: Pods, bucket_volumes: BucketDriver, namespace: str
) -> None:
    directory = f"mounts/{namespace}"
    pods.start("p", "n1", directory)
    bucket_volumes.kill("n1")
    pods.sh("p", "echo kept > /files/a")
    assert stored(bucket_volumes, f"{directory}/a") == b"kept\n"
    bucket_volumes.start("n1")
    pods.delete("p")
    assert bucket_volumes.mounts("n1") == []


def test_a_node_that_lost_power_mounts_its_volumes_again(
    cluster: Cluster, pods: Pods, bucket_volumes: BucketDriver, namespace: str
) -> None:
    pods.start("p", "n2", f"mounts/{namespace}")
    pods.sh("p", "echo kept > /files/a")
    cluster.kill_node("n2")
    cluster.start_node("n2")
    bucket_volumes.start("n2")

    def has_file() -> bool:
        try:
            return pods.sh("p", "cat /files/a") == "kept\n"
        except subprocess.CalledProcessError:
            return False

    cluster.wait(has_file, "the pod")
    pods.delete("p")
    assert bucket_volumes.mounts("n2") == []
