"""
A cluster for benchmarks, in a network namespace of its own, with two users: Atoll and a plain
client, whose requests the API server counts apart.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers.kubernetes.cluster import Cluster
from tests.servers.kubernetes.images import PYTHON, make_images
from tests.servers.s3 import S3Server

from bench.server import Server

if TYPE_CHECKING:
    from contextlib import ExitStack

NAMESPACE = "atoll"
ATOLL, PLAIN = "bench-atoll", "bench-plain"
"""Service accounts, and the flow schemas that count their requests."""
DISPATCHED = re.compile(
    r'^apiserver_flowcontrol_dispatched_requests_total\{flow_schema="([^"]+)".*\} ([0-9.e+]+)$',
    re.MULTILINE,
)


class BenchCluster:
    """Two nodes with real pods, and an S3 server."""

    def __init__(self, stack: ExitStack) -> None:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
        self.cluster = stack.enter_context(Cluster(place, make_images(place)))
        self._s3 = stack.enter_context(S3Server(place))
        self.cluster.namespace(NAMESPACE)
        role = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}],
        }
        self.cluster.create(role, "bench", NAMESPACE)
        self.kubeconfigs = {name: self._account(name) for name in (ATOLL, PLAIN)}

    def _account(self, name: str) -> Path:
        cluster, subject = self.cluster, {"kind": "ServiceAccount", "name": name}
        cluster.create({"apiVersion": "v1", "kind": "ServiceAccount"}, name, NAMESPACE)
        binding = {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "subjects": [{**subject, "namespace": NAMESPACE}],
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": "Role",
                "name": "bench",
            },
        }
        cluster.create(binding, name, NAMESPACE)
        rule = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"]}
        account = {"name": name, "namespace": NAMESPACE}
        flow = {
            "apiVersion": "flowcontrol.apiserver.k8s.io/v1",
            "kind": "FlowSchema",
            "spec": {
                "matchingPrecedence": 500,
                "priorityLevelConfiguration": {"name": "workload-low"},
                "distinguisherMethod": {"type": "ByUser"},
                "rules": [
                    {
                        "subjects": [{"kind": "ServiceAccount", "serviceAccount": account}],
                        "resourceRules": [rule],
                    }
                ],
            },
        }
        cluster.create(flow, name)
        return cluster.service_account_kubeconfig(NAMESPACE, name)

    def server(self, data_dir: str = "", **env: str) -> Server:
        """A server of Atoll with sessions in this cluster; without a pool unless `env` has one."""
        settings = {
            "ATOLL_DRIVER": "kubernetes",
            "ATOLL_KUBERNETES__KUBECONFIG": str(self.kubeconfigs[ATOLL]),
            "ATOLL_KUBERNETES__NAMESPACE": NAMESPACE,
            "ATOLL_KUBERNETES__IMAGE": PYTHON,
            "ATOLL_KUBERNETES__OPEN_NETWORK": "true",
            "ATOLL_KUBERNETES__LINK": "direct",
            # The machine has few cores: more pods fit if each of them reserves little.
            "ATOLL_KUBERNETES__CPU_REQUEST": "0.01",
            "ATOLL_KUBERNETES__MEMORY_REQUEST": "0.05",
            "ATOLL_POOL__SIZE": "0",
            "ATOLL_POOL__MAX_SIZE": "0",
            **self._s3.environment(),
        }
        return Server(data_dir=data_dir, **{**settings, **env})

    def requests(self, user: str) -> int:
        """Requests of a user so far, except streams such as those of exec."""
        text = self.cluster.client.get("/metrics").text
        return sum(int(float(count)) for name, count in DISPATCHED.findall(text) if name == user)
