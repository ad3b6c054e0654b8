"""Atoll, installed in a cluster with its chart, with a database, Redis and a bucket outside."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import httpx

from tests.e2e.api import Api
from tests.servers.kubernetes.atoll_image import ATOLL
from tests.servers.kubernetes.cluster import Cluster
from tests.servers.kubernetes.helm import CHART, Helm
from tests.servers.kubernetes.images import PYTHON
from tests.servers.kubernetes.network import ip
from tests.servers.postgres import PostgreSQL
from tests.servers.redis import RedisServer
from tests.servers.s3 import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server

NAME = "atoll"
PORT = 8000
REPLICAS = 2
SELECTED = {"labelSelector": "app.kubernetes.io/component=server"}


class Release:
    """In a namespace that enforces the security standard `restricted`, as does its instances'."""

    def __init__(self, cluster: Cluster, helm: Helm, directory: Path) -> None:
        self.cluster = cluster
        self.namespace = cluster.namespace(f"atoll-{secrets.token_hex(4)}")
        self.instances = f"{self.namespace}-instances"
        self._helm = helm
        self._values = directory / "values.yaml"
        self._key = secrets.token_hex(16)
        self._stack = ExitStack()
        with ExitStack() as stack:
            host = cluster.network.host
            database = stack.enter_context(PostgreSQL(directory, host=host))
            password = secrets.token_hex(8)
            redis = stack.enter_context(RedisServer(directory, host=host, password=password))
            bucket = stack.enter_context(S3Server(directory, host=host))
            self._stack = stack.pop_all()
        values = self._chart_values(database.url, redis.url, bucket.endpoint)
        # JSON is YAML.
        self._values.write_text(json.dumps(values))

    def _chart_values(self, database: str, redis: str, bucket: str) -> dict[str, Any]:
        repository, _, tag = ATOLL.rpartition(":")
        return {
            "replicas": REPLICAS,
            "image": {"repository": repository, "tag": tag, "pullPolicy": "Never"},
            "secrets": {
                "databaseUrl": database,
                "redisUrl": redis,
                "apiKey": self._key,
                "secretsKey": secrets.token_hex(32),
                "blobAccessKeyId": ACCESS_KEY,
                "blobSecretAccessKey": SECRET_KEY,
            },
            "blobs": {"url": f"s3://{BUCKET}/atoll", "endpoint": bucket},
            "tls": {"insecure": True},
            "instances": {
                "namespace": self.instances,
                "createNamespace": True,
                "image": PYTHON,
                # This cluster does not enforce network policies.
                "openNetwork": True,
            },
            "settings": {"ATOLL_POOL__SIZE": 1},
            "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        }

    # Install

    def install(self) -> Self:
        # Services are reached through a node, which does for their addresses what it does for pods.
        node = next(iter(self.cluster.nodes.values()))
        ip("route", "replace", self.cluster.network.services, "via", node.address)
        self.helm("install")
        return self

    def helm(self, verb: str, *options: str) -> None:
        self._helm.run(
            verb, NAME, str(CHART), "--namespace", self.namespace, "--values", str(self._values),
            "--wait", "--timeout", "4m", *options, kubeconfig=self.cluster.kubeconfig,
        )  # fmt: skip

    def restart(self) -> None:
        """Replace the replicas one after the other."""
        self.cluster.kubectl("rollout", "restart", f"deployment/{NAME}", "-n", self.namespace)
        self.cluster.kubectl(
            "rollout", "status", f"deployment/{NAME}", "-n", self.namespace, timeout=240
        )

    def close(self) -> None:
        self.cluster.delete_namespace(self.namespace)
        self.cluster.delete_namespace(self.instances)
        self._stack.close()

    # Use

    def pods(self) -> list[dict[str, Any]]:
        """The replicas that are to stay."""
        found = self.cluster.ask("GET", self._pods, params=SELECTED)["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def changes(self, version: str) -> Iterator[dict[str, Any]]:
        """Replicas that change, from a resource version on, for some seconds."""
        params = {**SELECTED, "watch": "true", "resourceVersion": version, "timeoutSeconds": "5"}
        with self.cluster.client.stream("GET", self._pods, params=params) as response:
            for line in response.iter_lines():
                yield json.loads(line)["object"]

    @property
    def _pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def service(self) -> str:
        """Its address."""
        path = f"/api/v1/namespaces/{self.namespace}/services/{NAME}"
        return str(self.cluster.ask("GET", path)["spec"]["clusterIP"])

    def client(self, address: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self._key}"}
        return httpx.Client(base_url=f"http://{address}:{PORT}", headers=headers, timeout=90)

    @contextmanager
    def api(self) -> Iterator[Api]:
        """Through the Service."""
        with self.client(self.service()) as http:
            yield Api(http)
