"""That the cluster of the tests does what tests of the driver rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import httpx
import pytest

from tests.servers.kubernetes.cluster import Cluster
from tests.servers.kubernetes.images import BARE, PYTHON

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
SERVE = ("python3", "-m", "http.server", "8000")
# For a pod that is ready to be reached.
LISTENS = {"readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 1}}


def pod(
    cluster: Cluster, namespace: str, *command: str, image: str = PYTHON, **spec: Any
) -> dict[str, Any]:
    """A running pod named `p`, which satisfies the restricted standard."""
    begin(cluster, namespace, *command, image=image, **spec)
    return cluster.wait_for_pod(namespace, "p")


def begin(
    cluster: Cluster, namespace: str, *command: str, image: str = PYTHON, **more: Any
) -> None:
    container = {"name": "c", "image": image, "command": command, "securityContext": RESTRICTED}
    container |= more.pop("container", {})
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1, **more}
    labels = {"labels": {"app": "p"}}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", **labels}}
    cluster.create({**manifest, "spec": spec}, "p", namespace)


def test_a_restricted_pod_is_reached_by_its_address(cluster: Cluster, namespace: str) -> None:
    running = pod(cluster, namespace, *SERVE, container=LISTENS)
    assert httpx.get(f"http://{running['status']['podIP']}:8000/etc/mark").text == "from the image"
    with pytest.raises(subprocess.CalledProcessError) as refused:
        begin(cluster, namespace, *SERVE, hostNetwork=True)
    assert any("violates PodSecurity" in note for note in refused.value.__notes__)


def test_pods_reach_the_tests(cluster: Cluster, namespace: str) -> None:
    fetch = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).status)"
    where = pod(cluster, namespace, *SERVE, container=LISTENS)["status"]["podIP"]
    done = cluster.kubectl(
        "exec", "-n", namespace, "p", "--", "python3", "-c", fetch, f"http://{where}:8000"
    )
    assert done.strip() == "200"


def test_exec_transfers_input_and_exit_code(cluster: Cluster, namespace: str) -> None:
    pod(cluster, namespace, "sleep", "1000", image=BARE)
    inside = ("exec", "-i", "-n", namespace, "p", "--")
    assert cluster.kubectl(*inside, "tr", "a-z", "A-Z", input="hello") == "HELLO"
    with pytest.raises(subprocess.CalledProcessError) as failed:
        cluster.kubectl(*inside, "sh", "-c", "exit 7")
    assert failed.value.returncode == 7


def test_attach_reaches_the_first_process(cluster: Cluster, namespace: str) -> None:
    interactive = {"stdin": True, "stdinOnce": True}
    code = "print(input()[::-1])"
    pod(cluster, namespace, "python3", "-c", code, container=interactive, restartPolicy="Never")
    cluster.kubectl("attach", "-i", "-n", namespace, "p", input="hello\n")

    def ended() -> bool:
        found = cluster.pod(namespace, "p")
        return found is not None and found["status"]["phase"] == "Succeeded"

    cluster.wait(ended, "the end of the pod")
    assert cluster.kubectl("logs", "-n", namespace, "p") == "olleh\n"


def test_an_eviction_respects_the_disruption_budget(cluster: Cluster, namespace: str) -> None:
    budgets = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    spec = {"minAvailable": 1, "selector": {"matchLabels": {"app": "p"}}}
    cluster.ask("POST", budgets, json={"metadata": {"name": "b"}, "spec": spec})
    pod(cluster, namespace, *SERVE)

    def evict() -> int:
        path = f"/api/v1/namespaces/{namespace}/pods/p/eviction"
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "p"}}
        return cluster.client.post(path, json=eviction).status_code

    assert evict() == httpx.codes.TOO_MANY_REQUESTS
    cluster.ask("DELETE", f"{budgets}/b")
    cluster.wait(lambda: evict() == httpx.codes.CREATED, "the eviction")
    cluster.wait(lambda: cluster.pod(namespace, "p") is None, "the end of the pod")


def test_a_service_account_has_only_the_rights_of_its_role(
    cluster: Cluster, namespace: str
) -> None:
    account = cluster.service_account_kubeconfig(namespace, "default")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        cluster.kubectl_as(account, "get", "pods")
    assert any("Forbidden" in note for note in refused.value.__notes__)
    cluster.kubectl("create", "role", "r", "-n", namespace, "--verb=list", "--resource=pods")
    cluster.kubectl(
        "create", "rolebinding", "b", "-n", namespace, "--role=r",
        f"--serviceaccount={namespace}:default",
    )  # fmt: skip
    cluster.kubectl_as(account, "get", "pods")


def test_pods_of_a_lost_node_are_deleted(cluster: Cluster, namespace: str) -> None:
    pod(cluster, namespace, *SERVE, nodeName="n2")
    cluster.kill_node("n2")
    try:
        cluster.wait(lambda: not cluster.node_ready("n2"), "the loss of the node")

        def marked() -> bool:
            found = cluster.pod(namespace, "p")
            return found is not None and "deletionTimestamp" in found["metadata"]

        cluster.wait(marked, "the deletion of the pod")
    finally:
        cluster.start_node("n2")
    # Only the node can say that it has ended.
    cluster.wait(lambda: cluster.pod(namespace, "p") is None, "the end of the pod")


def test_pods_outlive_their_kubelet_and_containerd(cluster: Cluster, namespace: str) -> None:
    before = pod(cluster, namespace, *SERVE, container=LISTENS, nodeName="n1")
    cluster.kill_kubelet("n1")
    cluster.restart_containerd("n1")
    assert httpx.get(f"http://{before['status']['podIP']}:8000").is_success
    cluster.start_kubelet("n1")
    inside = ("exec", "-n", namespace, "p", "--", "echo", "there")

    def answers() -> bool:
        try:
            return cluster.kubectl(*inside) == "there\n"
        except subprocess.CalledProcessError:
            return False

    cluster.wait(answers, "the kubelet")
    after = cluster.wait_for_pod(namespace, "p")
    statuses = [found["status"]["containerStatuses"] for found in (before, after)]
    assert statuses[0][0]["containerID"] == statuses[1][0]["containerID"]


def test_pods_outlive_the_control_plane(cluster: Cluster, namespace: str) -> None:
    before = pod(cluster, namespace, *SERVE, container=LISTENS)
    cluster.kill("kube-apiserver")
    cluster.kill("etcd")
    assert httpx.get(f"http://{before['status']['podIP']}:8000").is_success
    cluster.restart("etcd", "kube-apiserver")
    after = cluster.wait_for_pod(namespace, "p")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]


def test_a_paused_api_server_holds_its_clients_up(cluster: Cluster) -> None:
    cluster.pause("kube-apiserver")
    try:
        with pytest.raises(httpx.ReadTimeout):
            cluster.client.get("/readyz", timeout=0.5)
    finally:
        cluster.resume("kube-apiserver")
    cluster.wait(lambda: cluster.client.get("/readyz").is_success, "the API server")


KILL_PROXY = """
import os, signal
from pathlib import Path
for process in Path("/proc").glob("[0-9]*"):
    if "kube-proxy" in (process / "cmdline").read_text().split("\\0"):
        os.kill(int(process.name), signal.SIGKILL)
"""


def test_a_wait_fails_with_the_log_of_a_component_that_died(cluster: Cluster) -> None:
    os.kill(cluster.pid("kube-scheduler"), signal.SIGKILL)
    try:
        with pytest.raises(AssertionError, match=r"kube-scheduler ended: .+"):
            cluster.wait(lambda: False, "nothing")
    finally:
        cluster.restart("kube-scheduler")
    cluster.nodes["n1"].run(sys.executable, "-c", KILL_PROXY)
    try:
        with pytest.raises(AssertionError, match=r"n1-kube-proxy ended: .+"):
            cluster.wait(lambda: False, "nothing")
    finally:
        cluster.nodes["n1"].start("kube-proxy")
