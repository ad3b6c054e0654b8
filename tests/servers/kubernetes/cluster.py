"""
A Kubernetes cluster for tests.

It lives in the network namespace of the tests (`tests.servers.kubernetes.network`), where the tests
reach its API, its nodes and its pods; there is no way out and no DNS. NetworkPolicies are accepted
and not enforced. Images are those of `tests.servers.kubernetes.images` and what `import_image`
adds. The runtime class `plain` is runc by another name; `gvisor` exists where runsc is installed.

The control plane and the nodes can be killed, paused and started one by one. Nothing is left when
it stops, or when the tests are killed.

Two nodes use about 40 inotify instances of root. Components of clusters beyond what the machine
allows (`fs.inotify.max_user_instances`, often 128) end with "too many open files".
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Self

import httpx

from tests.servers import program
from tests.servers.kubernetes import binaries, images, network, node_config, snapshots
from tests.servers.kubernetes.control_plane import API_PORT, COMPONENTS, ControlPlane
from tests.servers.kubernetes.node import Node
from tests.servers.kubernetes.pki import Authority
from tests.servers.kubernetes.processes import Processes

PROGRAMS = {
    "containerd": "containerd", "ctr": "containerd", "runc": "runc", "ip": "iproute2",
    "iptables": "iptables", "nsenter": "util-linux", "unshare": "util-linux",
}  # fmt: skip
PATIENCE = 120
"""Seconds to wait for what takes a few on a machine without other work."""


class Cluster:
    """`directory` is for the logs; `archives` are images for all nodes."""

    def __init__(self, directory: Path, archives: Sequence[Path] = ()) -> None:
        network.require_own_namespace()
        for name, package in PROGRAMS.items():
            program(name, package)
        logs = directory / "cluster"
        logs.mkdir()
        with ExitStack() as stack:
            self.place = Path(tempfile.mkdtemp(prefix="atoll-k-"))
            # The last to go: it removes the directory too.
            self._processes = Processes(self.place, self.place.name, logs)
            stack.callback(self._processes.close)
            self._hyperkube = binaries.unpack(self.place)
            self._snapshotter = snapshots.choose(self.place)
            pause = images.make_pause(self.place / "pause.tar")
            self._archives = [pause, *archives]
            self.network = network.create()
            stack.callback(self.network.remove)
            self.api_url = f"https://{self.network.host}:{API_PORT}"
            self._authority = Authority(self.place / "pki", self.api_url)
            self.ca = self._authority.ca
            """The certificate of the authority, in PEM."""
            self.kubeconfig = self._authority.kubeconfig(
                "admin", subject="admin", group="system:masters"
            )
            """Of an administrator, who may do everything."""
            admin = self._authority.pair("tests", subject="tests", group="system:masters")
            self.client = stack.enter_context(
                httpx.Client(
                    base_url=self.api_url, verify=self._authority.context(admin), timeout=30
                )
            )
            """An administrator's client of the API, for the tests' own requests."""
            self._control_plane = ControlPlane(
                self.place, self._hyperkube, self.network, self._authority, self._processes
            )
            self._stack = stack.pop_all()
        self.nodes: dict[str, Node] = {}
        self._accounts = 0

    # Start and stop

    def start(self, nodes: int = 2) -> Self:
        for index in range(1, nodes + 1):
            name = f"n{index}"
            config = node_config.Node(
                name, index, self.place / name, f"{self.place.name}/{name}", self._snapshotter
            )
            self.nodes[name] = Node(
                config, self._hyperkube, self.network, self._authority, self._processes
            )
        with ThreadPoolExecutor() as threads:
            for ended in [
                threads.submit(self._start_control_plane),
                *(threads.submit(self._boot, node) for node in self.nodes.values()),
            ]:
                ended.result()
        for node in self.nodes.values():
            node.start("kubelet")
            node.start("kube-proxy")
        for name in node_config.RUNTIMES:
            self.create(
                {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": name}, name
            )
        self.wait(lambda: all(map(self.node_ready, self.nodes)), "the nodes")
        self._wait_for_account("default")
        return self

    def stop(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *error: object) -> None:
        self.stop()

    # Use

    def kubectl(self, *arguments: str, input: str | None = None, timeout: float = 60) -> str:
        """Run kubectl as an administrator; the exception of a failed one has its error output."""
        return self.kubectl_as(self.kubeconfig, *arguments, input=input, timeout=timeout)

    def kubectl_as(
        self, kubeconfig: Path, *arguments: str, input: str | None = None, timeout: float = 60
    ) -> str:
        try:
            done = subprocess.run(
                [self._hyperkube, "kubectl", "--kubeconfig", kubeconfig, *arguments],
                input=input,
                stdin=subprocess.DEVNULL if input is None else None,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=True,
                # It caches what the API has, by address: another cluster has the same.
                env={**os.environ, "HOME": str(self.place), "KUBECACHEDIR": str(self.place / "c")},
            )
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise
        return done.stdout

    def kubectl_json(self, *arguments: str) -> dict[str, Any]:
        return dict(json.loads(self.kubectl(*arguments, "--output", "json")))

    def ask(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """A request to the API; the error of a failed one contains the server's message."""
        answer = self.client.request(method, path, **options)
        if answer.is_error:
            raise httpx.HTTPStatusError(answer.text, request=answer.request, response=answer)
        return dict(answer.json())

    def create(self, manifest: dict[str, Any], name: str, namespace: str = "default") -> None:
        """Create an object of any kind."""
        whole = manifest | {"metadata": {"name": name} | manifest.get("metadata", {})}
        self.kubectl("create", "--namespace", namespace, "-f", "-", input=json.dumps(whole))

    def pod(self, namespace: str, name: str) -> dict[str, Any] | None:
        """None if it does not exist."""
        path = f"/api/v1/namespaces/{namespace}/pods/{name}"
        try:
            return self.ask("GET", path)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.NOT_FOUND:
                raise
            return None

    def wait_for_pod(self, namespace: str, name: str, condition: str = "Ready") -> dict[str, Any]:
        """The pod, as soon as a condition is true."""

        def holds() -> bool:
            found = self.pod(namespace, name)
            return found is not None and _condition(found, condition) == "True"

        self.wait(holds, f"pod {name}")
        found = self.pod(namespace, name)
        assert found is not None
        return found

    def namespace(self, name: str, *, enforce: str = "restricted") -> str:
        """A namespace with a default service account, whose pods satisfy a security standard."""
        labels = {"pod-security.kubernetes.io/enforce": enforce}
        content = {"metadata": {"name": name, "labels": labels}}
        self.ask("POST", "/api/v1/namespaces", json=content)
        self._wait_for_account(name)
        return name

    def delete_namespace(self, name: str) -> None:
        """Does not wait for the end."""
        self.ask("DELETE", f"/api/v1/namespaces/{name}")

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """A kubeconfig with a token of an existing service account, valid for an hour."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        answer = self.ask("POST", path, json={"spec": {"expirationSeconds": 3600}})
        self._accounts += 1
        return self._authority.token_kubeconfig(
            f"account-{self._accounts}", answer["status"]["token"], namespace
        )

    def requests_of(self, namespace: str, account: str) -> Iterator[dict[str, Any]]:
        """What a service account has requested, as events of the audit log."""
        user = f"system:serviceaccount:{namespace}:{account}"
        for line in self._control_plane.audit_log.read_text().splitlines():
            event = json.loads(line)
            if event["user"]["username"] == user:
                yield event

    def import_image(self, archive: Path) -> None:
        """Import an OCI or Docker archive into all nodes."""
        for node in self.nodes.values():
            node.import_images([archive])
        self._archives.append(archive)

    def wait(self, ready: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
        """
        Wait for a state that only requests can show; requests that fail are repeated. Fails at once
        when a component has ended that no test killed.
        """
        deadline = monotonic() + timeout
        while True:
            try:
                if ready():
                    return
                problem = ""
            except httpx.HTTPError as error:
                problem = str(error)
            self._processes.require_alive(
                [log for node in self.nodes.values() for log in node.died()]
            )
            if monotonic() > deadline:
                raise AssertionError(f"Waited for {what} {problem}\n\n{self._processes.report()}")
            sleep(0.05)

    # Nodes

    def node_ready(self, name: str) -> bool:
        """What the control plane reports."""
        answer = self.client.get(f"/api/v1/nodes/{name}")
        return answer.is_success and _condition(answer.json(), "Ready") == "True"

    def kill_node(self, name: str) -> None:
        """Like a power failure. Its disk survives."""
        self.nodes[name].kill()

    def start_node(self, name: str) -> None:
        """Start a killed node again, and wait until it is ready."""
        node = self.nodes[name]
        before = self._heartbeat(name)
        node.boot(len(self.nodes))
        node.start("kubelet")
        node.start("kube-proxy")
        self.wait(lambda: self._heartbeat(name) != before and self.node_ready(name), f"node {name}")

    def disconnect_node(self, name: str) -> None:
        """Cut its network; what runs there goes on."""
        self.nodes[name].set_connected(False)

    def connect_node(self, name: str) -> None:
        self.nodes[name].set_connected(True)

    def kill_kubelet(self, name: str) -> None:
        """Pods keep running."""
        self.nodes[name].signal("kubelet", signal.SIGKILL)

    def start_kubelet(self, name: str) -> None:
        self.nodes[name].start("kubelet")

    def restart_containerd(self, name: str) -> None:
        """Pods keep running."""
        self.nodes[name].signal("containerd", signal.SIGKILL)
        self.nodes[name].start("containerd")

    # Control plane

    def kill(self, component: str) -> None:
        """One of `COMPONENTS`, such as kube-apiserver or etcd."""
        self._control_plane.component(component).kill()

    def restart(self, *components: str) -> None:
        """Start killed components again, and wait until the API server is ready."""
        for component in components:
            self._control_plane.start(component)
        self.wait(self._answers, ", ".join(components))

    def pid(self, component: str) -> int:
        return self._control_plane.component(component).pid

    def pause(self, component: str) -> None:
        """It keeps its connections and responds to nothing."""
        self._control_plane.component(component).pause()

    def resume(self, component: str) -> None:
        self._control_plane.component(component).resume()

    def _start_control_plane(self) -> None:
        etcd, api_server, *others = COMPONENTS
        self._control_plane.start(etcd)
        self._control_plane.start(api_server)
        self.wait(self._answers, "the API server")
        for component in others:
            self._control_plane.start(component)

    def _boot(self, node: Node) -> None:
        node.boot(len(self.nodes))
        node.import_images(self._archives)

    def _answers(self) -> bool:
        return self.client.get("/readyz").is_success

    def _heartbeat(self, name: str) -> str | None:
        """When its kubelet last renewed its lease; None before it has one."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}"
        answer = self.client.get(path)
        return str(answer.json()["spec"]["renewTime"]) if answer.is_success else None

    def _wait_for_account(self, namespace: str) -> None:
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        self.wait(lambda: self.client.get(path).is_success, f"namespace {namespace}")


def _condition(entity: dict[str, Any], kind: str) -> str | None:
    conditions = entity["status"].get("conditions", ())
    return next((found["status"] for found in conditions if found["type"] == kind), None)
