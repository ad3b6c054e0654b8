"""Sessions of a server on the tests' cluster, and the pods that they have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.api import V1, Api, answer, eventually
from tests.harness import Server
from tests.kubernetes.servers import environment
from tests.servers.kubernetes.cluster import Cluster
from tests.servers.s3 import S3Server

LONG = 90
"""Seconds in which anything that happens at all has happened."""
FIRST_RUN_WAITS = """
import time
with open("runs", "a") as file:
    file.write("x")
while open("runs").read() == "x":
    time.sleep(0.02)
print(open("runs").read(), open("kept").read())
"""
"""Ends only in its second run, and only with the files of the first one."""


class Sandboxes:
    """Sessions of a server, and the pods that they have."""

    def __init__(self, server: Server, api: Api, cluster: Cluster, namespace: str) -> None:
        self.server = server
        self.api = api
        self.cluster = cluster
        self.namespace = namespace
        self.pods = f"/api/v1/namespaces/{namespace}/pods"

    def create(self, **fields: Any) -> str:
        """A session with a file, as soon as the cluster has the image."""
        made: list[str] = []

        def is_made() -> bool:
            response = self.api.http.post(f"{V1}/sessions", json=fields)
            if response.status_code == 503 and response.json()["code"] == "template_not_here":
                return False
            made.append(answer(response, 201)["id"])
            return True

        eventually(is_made, LONG)
        self.api.put(made[0], "kept", b"kept")
        return made[0]

    def pod(self, session: str) -> dict[str, Any]:
        """The pod of the session's instance."""
        name = str(self.api.get(session)["container_id"]).replace("_", "-")
        found = self.cluster.pod(self.namespace, f"atoll-{name}")
        assert found is not None, f"{session} has no pod"
        return found

    def evict(self, session: str) -> None:
        name = self.pod(session)["metadata"]["name"]
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
        self.cluster.ask("POST", f"{self.pods}/{name}/eviction", json=eviction)

    def checkpoint(self, session: str) -> None:
        answer(self.api.http.post(f"{V1}/sessions/{session}/checkpoint"))

    def start(self, session: str) -> str:
        """An execution whose first run has begun."""
        execution = self.api.submit(session, FIRST_RUN_WAITS, timeout=LONG)
        eventually(lambda: "runs" in self.api.names(session))
        return execution

    def check_retried(self, session: str, execution: str) -> None:
        result = self.api.result(execution)
        assert result["stdout"] == "xx kept\n", result
        assert self.api.execution(execution)["retry_count"] == 1

    def replaced(self, session: str, before: str) -> str:
        """The reason that the session gives for its new instance."""

        def has_another() -> bool:
            found = self.api.get(session)
            return found["status"] == "running" and found["container_id"] not in (None, before)

        eventually(has_another, LONG)
        assert self.api.run(session, "print(open('kept').read())")["stdout"] == "kept\n"
        warnings = {one["code"]: one for one in self.api.get(session)["warnings"]}
        return str(warnings["instance_replaced"]["message"])

    def instance(self, session: str) -> str:
        return str(self.api.get(session)["container_id"])


@contextmanager
def serving(
    cluster: Cluster, s3: S3Server, place: Path, namespace: str, **own: str
) -> Iterator[Server]:
    """A server that keeps no pods in advance."""
    env = {
        **s3.environment(ATOLL_BLOB__URL=f"s3://atoll/{namespace}"),
        **environment(cluster, namespace, timeout="4", schedule_timeout="3"),
        "ATOLL_POOL__SIZE": "0",
        "ATOLL_SESSION__DISK": str(16 * 2**20),
        "ATOLL_EXECUTION__RETRY_BACKOFF": "0.2",
        "ATOLL_TEMPLATE__BUILD_RETRIES": "1",
        "ATOLL_TEMPLATE__BUILD_BACKOFF": "0.1",
        **own,
    }
    with Server(place, "--stop-sessions", **env) as server:
        yield server
