"""One real cluster for the tests that need Kubernetes. They run with `make test-kubernetes`."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.kubernetes import network
from tests.servers.kubernetes.cluster import Cluster
from tests.servers.kubernetes.helm import Helm
from tests.servers.kubernetes.images import make_images


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them where a cluster would change this machine's network, as in a run of all tests."""
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
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return Helm(tmp_path_factory.mktemp("helm"))
