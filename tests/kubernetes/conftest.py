"""One real cluster for the tests that need Kubernetes. They run with `make test-kubernetes`."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.contract.drivers.conftest import ON_CLUSTER, select
from tests.e2e.api import Api
from tests.kubernetes.nodes import ClusterNode
from tests.kubernetes.sandboxes import Sandboxes, serving
from tests.servers.kubernetes import network
from tests.servers.kubernetes.bucket_driver import BucketDriver, bucket_driver
from tests.servers.kubernetes.cluster import Cluster
from tests.servers.kubernetes.helm import Helm
from tests.servers.kubernetes.images import make_images
from tests.servers.s3 import S3Server


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip them where a cluster would change this machine's network, as in a run of all tests."""
    select(config, items, Path(__file__).parent, lambda kind: kind in ON_CLUSTER)
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    # Without them, the tests give the reason.
    if here and os.geteuid() == 0 and shutil.which("ip") and network.foreign_interfaces():
        for item in here:
            item.add_marker(pytest.mark.skip(reason=network.NO_NAMESPACE))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """With two nodes, n1 and n2. A test that kills something starts it again."""
    directory = tmp_path_factory.mktemp("kubernetes")
    with Cluster(directory, make_images(directory)) as running:
        yield running


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A new namespace that enforces the security standard `restricted`."""
    name = cluster.namespace(f"test-{secrets.token_hex(4)}")
    yield name
    cluster.delete_namespace(name)


@pytest.fixture(scope="session")
def cluster_s3(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server that nodes and pods reach."""
    with S3Server(tmp_path_factory.mktemp("s3"), host=cluster.network.host) as running:
        yield running


@pytest.fixture(scope="module")
def bucket_volumes(cluster: Cluster, cluster_s3: S3Server) -> Iterator[BucketDriver]:
    """A CSI driver for directories of the bucket. A node that a test restarts needs a `start`."""
    with bucket_driver(cluster, cluster_s3) as running:
        yield running


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def instances_namespace(cluster: Cluster) -> Iterator[str]:
    """For drivers that are tested one after the other."""
    name = cluster.namespace(f"instances-{secrets.token_hex(4)}")
    yield name
    cluster.delete_namespace(name)


@pytest.fixture(scope="session")
def sandboxes(
    cluster: Cluster, s3: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sandboxes]:
    """One server for all tests: nothing that happens to the cluster makes it need a restart."""
    namespace = cluster.namespace(f"server-{secrets.token_hex(4)}")
    place = tmp_path_factory.mktemp("server")
    with serving(cluster, s3, place, namespace) as server, server.client() as http:
        yield Sandboxes(server, Api(http), cluster, namespace)
    assert server.stderr().split("Traceback (most recent call last)")[1:] == []
    cluster.delete_namespace(namespace)


@pytest.fixture
def session(sandboxes: Sandboxes) -> Iterator[str]:
    """With the file `kept`."""
    made = sandboxes.create()
    yield made
    sandboxes.api.end(made)


@pytest.fixture(params=["kubernetes"])
async def node(
    request: pytest.FixtureRequest, cluster: Cluster, instances_namespace: str, tmp_path: Path
) -> AsyncIterator[ClusterNode]:
    made = ClusterNode(request.param, tmp_path / "data", cluster, instances_namespace)
    await made.open()
    yield made
    await made.clear()
