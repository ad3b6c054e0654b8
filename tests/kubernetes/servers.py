"""Servers of Atoll whose instances are pods of the tests' cluster."""

from __future__ import annotations

from tests.servers.kubernetes.cluster import Cluster
from tests.servers.kubernetes.images import PYTHON


def environment(cluster: Cluster, namespace: str, **own: str) -> dict[str, str]:
    """The settings of a server; `own` are further ones of the group `kubernetes`."""
    given = {
        "kubeconfig": str(cluster.kubeconfig),
        "namespace": namespace,
        "image": PYTHON,
        # The network of the test cluster enforces no policies.
        "open_network": "true",
        # The tests are in the network of the pods.
        "link": "direct",
        "lost_after": "1",
        **own,
    }
    return {
        "ATOLL_DRIVER": "kubernetes",
        **{f"ATOLL_KUBERNETES__{name.upper()}": value for name, value in given.items()},
    }
