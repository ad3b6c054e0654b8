"""Parts of the cluster fail: sessions go on, and Atoll needs no restart."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.api import V1, Api, eventually, problem, until
from tests.kubernetes.sandboxes import LONG, Sandboxes, serving
from tests.servers.kubernetes.cluster import Cluster
from tests.servers.redis import RedisServer
from tests.servers.s3 import S3Server

WAITS = until("go") + "print('done')"


# Machines


def test_a_session_continues_when_its_machine_is_lost(sandboxes: Sandboxes, session: str) -> None:
    before = sandboxes.instance(session)
    machine = sandboxes.pod(session)["spec"]["nodeName"]
    execution = sandboxes.start(session)
    # Of a machine without power nothing can be saved later.
    sandboxes.checkpoint(session)
    sandboxes.cluster.kill_node(machine)
    try:
        sandboxes.cluster.wait(lambda: not sandboxes.cluster.node_ready(machine), "its loss")
        sandboxes.check_retried(session, execution)
        assert machine in sandboxes.replaced(session, before)
        assert sandboxes.pod(session)["spec"]["nodeName"] != machine
    finally:
        sandboxes.cluster.start_node(machine)


def test_sessions_outlive_their_kubelet_and_containerd(sandboxes: Sandboxes, session: str) -> None:
    before, machine = sandboxes.instance(session), sandboxes.pod(session)["spec"]["nodeName"]
    execution = sandboxes.api.submit(session, WAITS, timeout=LONG)
    sandboxes.api.await_status(execution, "running")
    sandboxes.cluster.kill_kubelet(machine)
    try:
        sandboxes.cluster.restart_containerd(machine)
        assert sandboxes.api.names(session) == ["kept"]
    finally:
        sandboxes.cluster.start_kubelet(machine)
    sandboxes.api.put(session, "go")
    assert sandboxes.api.result(execution)["stdout"] == "done\n"
    sandboxes.cluster.wait(lambda: sandboxes.cluster.node_ready(machine), "the kubelet")
    assert sandboxes.instance(session) == before


# The control plane of the cluster


Outage = Callable[[Cluster, str], AbstractContextManager[None]]


@contextmanager
def killed(cluster: Cluster, component: str) -> Iterator[None]:
    cluster.kill(component)
    try:
        yield
    finally:
        cluster.restart(component)


@contextmanager
def paused(cluster: Cluster, component: str) -> Iterator[None]:
    cluster.pause(component)
    try:
        yield
    finally:
        cluster.resume(component)


@pytest.mark.parametrize(
    ("outage", "component"),
    [(killed, "kube-apiserver"), (paused, "kube-apiserver"), (paused, "etcd")],
)
def test_running_sessions_work_while_the_cluster_has_no_control_plane(
    sandboxes: Sandboxes, session: str, outage: Outage, component: str
) -> None:
    before = sandboxes.instance(session)
    with outage(sandboxes.cluster, component):
        refused = sandboxes.api.http.post(f"{V1}/sessions", json={})
        assert "API server" in problem(refused, 503, "cluster_unavailable")["detail"]
        assert "Retry-After" in refused.headers
        result = sandboxes.api.run(session, "print(open('kept').read())")
        assert result["stdout"] == "kept\n", result
        sandboxes.api.put(session, "more", b"1")
    other = sandboxes.create()
    sandboxes.api.end(other)
    assert sandboxes.instance(session) == before
    # What happens to pods is seen again.
    sandboxes.evict(session)
    assert "EvictionByEvictionAPI" in sandboxes.replaced(session, before)
    assert sandboxes.api.run(session, "print(open('more').read())")["stdout"] == "1\n"


def test_a_server_waits_at_its_start_for_an_api_server_that_is_down(
    cluster: Cluster, namespace: str, s3: S3Server, tmp_path: Path
) -> None:
    server = serving(cluster, s3, tmp_path, namespace)
    with ThreadPoolExecutor(1) as threads:
        with killed(cluster, "kube-apiserver"):
            starting = threads.submit(server.__enter__)
            log = tmp_path / "server.log"
            eventually(lambda: log.exists() and "cluster.not_opened" in log.read_text(), LONG)
        running = starting.result()
    with running.client() as http:
        sandboxes = Sandboxes(running, Api(http), cluster, namespace)
        sandboxes.api.end(sandboxes.create())
    server.__exit__(None, None, None)


# Replicas


@pytest.fixture
def replicas(cluster: Cluster, s3: S3Server, tmp_path: Path) -> Iterator[list[Sandboxes]]:
    """Two, with one database."""
    namespace = cluster.namespace(f"replicas-{secrets.token_hex(4)}")
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(tmp_path / "redis"))
        common = {
            "ATOLL_REDIS_URL": redis.url,
            "ATOLL_DATABASE_URL": f"sqlite:///{tmp_path / 'shared.db'}",
            "ATOLL_API_KEY": secrets.token_hex(16),
            "ATOLL_SECRETS__KEY": "42" * 32,
        }
        found = []
        for number in range(2):
            place = tmp_path / f"replica-{number}"
            place.mkdir()
            (place / "key").write_text(common["ATOLL_API_KEY"])
            server = stack.enter_context(serving(cluster, s3, place, namespace, **common))
            api = Api(stack.enter_context(server.client()))
            found.append(Sandboxes(server, api, cluster, namespace))
        yield found
    cluster.delete_namespace(namespace)


def test_one_of_two_replicas_replaces_an_evicted_instance(replicas: list[Sandboxes]) -> None:
    one, two = replicas
    session = one.create()
    before = one.instance(session)
    execution = one.start(session)
    one.evict(session)
    two.check_retried(session, execution)
    one.replaced(session, before)
    logs = "".join(replica.server.stderr() for replica in replicas)
    assert logs.count("session.instance_replaced") == 1
    assert len(one.cluster.ask("GET", one.pods)["items"]) == 1
    for replica in replicas:
        assert replica.api.run(session, "print(open('kept').read())")["stdout"] == "kept\n"
