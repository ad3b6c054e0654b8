"""One real cluster for the tests that need Kubernetes. They run with `make test-kubernetes`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.servers.kubernetes.cluster import Cluster
from tests.servers.kubernetes.images import make_images


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
