"""etcd, the API server, the controller manager and the scheduler of one cluster."""

from __future__ import annotations

import json
from pathlib import Path

from tests.servers import free_port
from tests.servers.kubernetes.network import Network
from tests.servers.kubernetes.pki import FRONT_PROXY, Authority, Pair
from tests.servers.kubernetes.processes import Process, Processes

API_PORT = 6443
COMPONENTS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
# A node is lost when it has renewed its lease for this long not; it does that every 2 s.
NODE_GRACE = 12
"""Seconds until a silent node is NotReady."""
TOLERATION = 5
"""Seconds from then until its pods are deleted, if they ask for no other time."""
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
        {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
        {"level": "None"},
    ],
}
"""Records what the service accounts of tests request."""
_FAST = ("--kube-api-qps=1000", "--kube-api-burst=2000", "--profiling=false")


class ControlPlane:
    """Its data survives a kill of every component."""

    def __init__(
        self,
        place: Path,
        hyperkube: Path,
        network: Network,
        authority: Authority,
        processes: Processes,
    ) -> None:
        self.audit_log = place / "audit.log"
        self._hyperkube = str(hyperkube)
        self._processes = processes
        self._commands = _commands(place, network, authority)
        self._running: dict[str, Process] = {}

    def start(self, component: str) -> None:
        self._running[component] = self._processes.start(
            component, self._hyperkube, *self._commands[component]
        )

    def component(self, name: str) -> Process:
        return self._running[name]


def _commands(place: Path, network: Network, authority: Authority) -> dict[str, list[str]]:
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    signer = authority.service_account_key()
    names = ("localhost", "kubernetes.default.svc", network.host, network.first_service)
    serving = authority.pair("apiserver", *names, subject="kube-apiserver")
    to_kubelets = authority.pair("kubelet-client", subject="kubelet-client", group="system:masters")
    proxy = authority.pair("front-proxy", subject=FRONT_PROXY)
    policy = place / "audit.json"
    policy.write_text(json.dumps(AUDIT_POLICY))
    etcd = [
        "etcd", "--data-dir", str(place / "etcd"), "--unsafe-no-fsync", "--log-level", "warn",
        "--listen-client-urls", client, "--advertise-client-urls", client,
        "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
        "--initial-cluster", f"default={peer}",
    ]  # fmt: skip
    api_server = [
        "kube-apiserver", "--etcd-servers", client, "--allow-privileged", "--profiling=false",
        "--bind-address", network.host, "--advertise-address", network.host,
        "--secure-port", str(API_PORT), "--service-cluster-ip-range", network.services,
        "--authorization-mode", "Node,RBAC", "--enable-admission-plugins", "NodeRestriction",
        f"--default-not-ready-toleration-seconds={TOLERATION}",
        f"--default-unreachable-toleration-seconds={TOLERATION}",
        "--client-ca-file", str(authority.ca),
        *_files("--tls-cert-file", "--tls-private-key-file", serving),
        *_files("--kubelet-client-certificate", "--kubelet-client-key", to_kubelets),
        "--kubelet-certificate-authority", str(authority.ca),
        "--kubelet-preferred-address-types", "InternalIP",
        *_files("--service-account-key-file", "--service-account-signing-key-file", signer),
        "--service-account-issuer", "https://kubernetes.default.svc",
        "--requestheader-client-ca-file", str(authority.ca),
        "--requestheader-allowed-names", FRONT_PROXY,
        "--requestheader-username-headers", "X-Remote-User",
        "--requestheader-group-headers", "X-Remote-Group",
        "--requestheader-extra-headers-prefix", "X-Remote-Extra-",
        *_files("--proxy-client-cert-file", "--proxy-client-key-file", proxy),
        "--audit-policy-file", str(policy), "--audit-log-path", str(place / "audit.log"),
    ]  # fmt: skip
    manager = [
        "kube-controller-manager", *_client(authority, "kube-controller-manager"), *_FAST,
        "--bind-address", network.host, "--leader-elect=false", "--use-service-account-credentials",
        "--root-ca-file", str(authority.ca), "--service-account-private-key-file", str(signer.key),
        "--node-monitor-period=1s", f"--node-monitor-grace-period={NODE_GRACE}s",
        # Otherwise pods of the second lost node wait for 10 s, or for ever.
        "--node-eviction-rate=10", "--secondary-node-eviction-rate=10",
    ]  # fmt: skip
    scheduler = [
        "kube-scheduler", *_client(authority, "kube-scheduler"), *_FAST,
        "--bind-address", network.host, "--leader-elect=false",
    ]  # fmt: skip
    return dict(zip(COMPONENTS, (etcd, api_server, manager, scheduler), strict=True))


def _client(authority: Authority, name: str) -> list[str]:
    config = str(authority.kubeconfig(name, subject=f"system:{name}"))
    return [
        "--kubeconfig", config,
        "--authentication-kubeconfig", config, "--authorization-kubeconfig", config,
    ]  # fmt: skip


def _files(certificate: str, key: str, pair: Pair) -> list[str]:
    return [certificate, str(pair.certificate), key, str(pair.key)]
