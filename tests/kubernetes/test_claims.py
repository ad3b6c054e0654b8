"""Workspaces in persistent volume claims: files outlive pods without checkpoints."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.api import Api, eventually
from tests.kubernetes.sandboxes import LONG, Sandboxes, serving
from tests.servers.kubernetes.cluster import Cluster
from tests.servers.s3 import S3Server

VOLUMES = 3


@pytest.fixture
def storage_class(cluster: Cluster, tmp_path: Path) -> Iterator[str]:
    """Volumes that every machine of the cluster reaches, as those of a network storage."""
    name = f"shared-{secrets.token_hex(4)}"
    machines = {"key": "kubernetes.io/hostname", "operator": "In", "values": list(cluster.nodes)}
    for number in range(VOLUMES):
        (tmp_path / str(number)).mkdir()
        spec = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce"],
            "storageClassName": name,
            "local": {"path": str(tmp_path / str(number))},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [machines]}]}},
        }
        volume = {"apiVersion": "v1", "kind": "PersistentVolume", "spec": spec}
        cluster.create(volume, f"{name}-{number}")
    yield name
    for number in range(VOLUMES):
        cluster.ask("DELETE", f"/api/v1/persistentvolumes/{name}-{number}")


@pytest.fixture
def claiming(
    cluster: Cluster, namespace: str, s3: S3Server, storage_class: str, tmp_path: Path
) -> Iterator[Sandboxes]:
    own = {
        "ATOLL_KUBERNETES__WORKSPACES": "claims",
        "ATOLL_KUBERNETES__STORAGE_CLASS": storage_class,
        # No checkpoint is taken while a test runs.
        "ATOLL_WORKSPACE__DELAY": "3600",
    }
    place = tmp_path / "server"
    place.mkdir()
    with serving(cluster, s3, place, namespace, **own) as server, server.client() as http:
        yield Sandboxes(server, Api(http), cluster, namespace)


def claims(sandboxes: Sandboxes) -> list[str]:
    path = f"/api/v1/namespaces/{sandboxes.namespace}/persistentvolumeclaims"
    return [item["metadata"]["name"] for item in sandboxes.cluster.ask("GET", path)["items"]]


def test_files_in_a_claim_outlive_evictions_and_stops(claiming: Sandboxes) -> None:
    session = claiming.create()
    before = claiming.instance(session)
    (claim,) = claims(claiming)
    execution = claiming.start(session)
    claiming.evict(session)
    claiming.check_retried(session, execution)
    assert "EvictionByEvictionAPI" in claiming.replaced(session, before)
    assert claims(claiming) == [claim]

    http = claiming.api.http
    assert http.post(f"/api/v1/sessions/{session}/stop").status_code == 200
    assert claims(claiming) == [claim]
    output = claiming.api.run(session, "print(open('kept').read())", wait=LONG)["stdout"]
    assert output == "kept\n"

    claiming.api.end(session)
    eventually(lambda: claims(claiming) == [], LONG)
