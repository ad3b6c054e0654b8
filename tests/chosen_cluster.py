"""
The Kubernetes cluster of `TEST_DRIVER=kubernetes`: all servers of the tests have their instances in
one namespace of it, and their files in one S3 server.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.drivers.kubernetes.labels import Label, value
from tests.kubernetes.pods import first_process
from tests.kubernetes.servers import environment
from tests.servers.kubernetes.cluster import Cluster
from tests.servers.kubernetes.images import make_images
from tests.servers.s3 import BUCKET, S3Server

if TYPE_CHECKING:
    from tests.harness import Server

NAMESPACE = "tests"


class ChosenCluster:
    def __init__(self, place: Path) -> None:
        self._prepared: set[Path] = set()
        self._stack = ExitStack()
        with ExitStack() as stack:
            self.cluster = stack.enter_context(Cluster(place, make_images(place)))
            self._s3 = stack.enter_context(S3Server(place))
            self.cluster.namespace(NAMESPACE)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def settings(self) -> dict[str, str]:
        """Of all servers."""
        # Many small pods share two cores with the servers and the tests.
        requests = {"cpu_request": "0.01", "memory_request": "0.05"}
        return {**self._s3.environment(), **environment(self.cluster, NAMESPACE, **requests)}

    def settings_of(self, data_dir: Path) -> dict[str, str]:
        """Of the servers with this data directory."""
        prefix = hashlib.sha256(str(data_dir).encode()).hexdigest()[:16]
        return {"ATOLL_BLOB__URL": f"s3://{BUCKET}/{prefix}"}

    def wait_for_template(self, server: Server) -> None:
        """After its first start: wait until it knows what is in the image of its template."""
        if server.data_dir in self._prepared:
            return
        self._prepared.add(server.data_dir)
        sessions = "/api/v1/sessions"
        with server.client() as http:

            def is_ready() -> bool:
                made = http.post(sessions, json={})
                if made.is_success:
                    http.delete(f"{sessions}/{made.json()['id']}")
                return made.is_success

            self.cluster.wait(is_ready, f"a session of {server.url}")

    # Instances

    def handle(self, data_dir: Path, instance_id: str) -> dict[str, Any]:
        """As `drivers.handle`. Asks no API server, which tests may have killed."""
        found = _recorded(data_dir, instance_id)
        child = first_process(str(found["uid"]))
        if child is None:
            raise FileNotFoundError(f"{instance_id} does not run")
        return handle_of(child, found["workspace"])

    def instances(self, data_dir: Path) -> set[str]:
        """Those of the database in this directory that are in the cluster."""
        cluster_id = (data_dir / "cluster").read_text().split()[0]
        selector = f"{Label.INSTANCE},{Label.CLUSTER}={value(cluster_id)}"
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        found = self.cluster.ask("GET", path, params={"labelSelector": selector})["items"]
        return {pod["metadata"]["labels"][Label.INSTANCE] for pod in found}


@contextmanager
def running(place: Path) -> Iterator[ChosenCluster]:
    found = ChosenCluster(place)
    try:
        yield found
    finally:
        found.close()


def handle_of(child: int, workspace: str) -> dict[str, Any]:
    """What `drivers.handle` returns, of an instance with this first process."""
    began, parent = _stat(child)
    return {
        "child": child,
        "child_started": began,
        "pid": parent,
        "started": _stat(parent)[0],
        "workspace": workspace,
    }


def _stat(pid: int) -> tuple[int, int]:
    """When a process began, and its parent."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except ProcessLookupError as error:
        raise FileNotFoundError(f"process {pid} has ended") from error
    return int(fields[19]), int(fields[1])


def _recorded(data_dir: Path, instance_id: str) -> dict[str, Any]:
    with closing(sqlite3.connect(data_dir / "atoll.db", timeout=60)) as connection:
        query = "SELECT handle FROM instances WHERE id = ?"
        row = connection.execute(query, (instance_id,)).fetchone()
    if row is None:
        raise FileNotFoundError(instance_id)
    data: dict[str, Any] = json.loads(row[0])["data"]
    return data
