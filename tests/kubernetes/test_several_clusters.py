"""Several clusters and a machine as nodes of one Atoll: sessions move between them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.api import V1, Api, answer, eventually
from tests.harness import Server
from tests.kubernetes.servers import environment
from tests.servers.kubernetes.cluster import Cluster
from tests.servers.redis import RedisServer
from tests.servers.s3 import S3Server

LONG = 60


@pytest.fixture
def nodes(
    cluster: Cluster, s3: S3Server, bubblewrap: str, tmp_path: Path
) -> Iterator[dict[str, Api]]:
    """
    Two clusters, which are namespaces of one, and this machine. Each has a server, and the API of
    each is that of all.
    """
    with ExitStack() as stack:
        redis = RedisServer(tmp_path)
        redis.start()
        stack.callback(redis.stop)
        common = {
            **s3.environment(ATOLL_BLOB__URL=f"s3://atoll/{secrets.token_hex(4)}"),
            "ATOLL_REDIS_URL": redis.url,
            "ATOLL_DATABASE_URL": f"sqlite:///{tmp_path / 'shared.db'}",
            "ATOLL_API_KEY": secrets.token_hex(16),
            "ATOLL_SECRETS__KEY": "42" * 32,
            "ATOLL_NODE__PROBE": "0.3",
            "ATOLL_POOL__SIZE": "0",
            "ATOLL_SESSION__DISK": str(16 * 2**20),
            "ATOLL_SESSION__CPU": "0.1",
        }
        found = {}
        for name in ("east", "west", "here"):
            own = {"ATOLL_NODE__LABELS": json.dumps({"place": name})}
            if name != "here":
                namespace = cluster.namespace(f"{name}-{secrets.token_hex(4)}")
                stack.callback(cluster.delete_namespace, namespace)
                own |= environment(cluster, namespace, node=name)
            (tmp_path / name).mkdir()
            (tmp_path / name / "key").write_text(common["ATOLL_API_KEY"])
            server = stack.enter_context(Server(tmp_path / name, **common, **own))
            found[name] = Api(stack.enter_context(server.client()))
        eventually(lambda: len(listed(found["east"])) == len(found), LONG)
        yield found


def listed(api: Api) -> dict[str, dict[str, object]]:
    return {item["id"]: item for item in answer(api.http.get(f"{V1}/nodes"))["items"]}


def create(api: Api, **fields: object) -> str:
    """A session, as soon as its node has the image."""
    made: list[str] = []

    def is_made() -> bool:
        response = api.http.post(f"{V1}/sessions", json=fields)
        if response.status_code == 201:
            made.append(response.json()["id"])
        else:
            assert response.status_code == 503, response.text
        return bool(made)

    eventually(is_made, LONG)
    return made[0]


def cordon(api: Api, *nodes: str) -> None:
    for name, node in listed(api).items():
        verb = "cordon" if name in nodes else "uncordon"
        if node["cordoned"] != (name in nodes):
            answer(api.http.post(f"{V1}/nodes/{name}/{verb}"))


def test_sessions_move_between_clusters_and_machines(nodes: dict[str, Api]) -> None:
    east, west, here = nodes.values()
    kinds = {node["type"] for node in listed(here).values()}
    assert kinds == {"kubernetes", "local"}

    (machine,) = [name for name, node in listed(here).items() if node["type"] == "local"]
    placed = create(here, node_labels={"place": "west"})
    assert east.get(placed)["runtime_node"] == "west"

    cordon(here, "west", machine)
    session = create(here)
    shown = west.get(session)
    assert (shown["runtime_node"], shown["runtime_type"]) == ("east", "kubernetes")
    # The server of another cluster passes the request on.
    assert west.run(session, "open('file', 'w').write('kept'); print(1)")["stdout"] == "1\n"

    # From a cluster to a machine.
    cordon(here, "west")
    answer(east.http.post(f"{V1}/nodes/east/drain"), 202)
    eventually(lambda: west.get(session)["runtime_node"] == machine, LONG)
    assert west.get(session)["runtime_type"] == "local"
    assert east.run(session, "print(open('file').read())")["stdout"] == "kept\n"

    # And from a machine to another cluster.
    answer(east.http.post(f"{V1}/nodes/west/uncordon"))
    answer(west.http.post(f"{V1}/nodes/{machine}/drain"), 202)
    eventually(lambda: here.get(session)["runtime_node"] == "west", LONG)
    assert here.get(session)["runtime_type"] == "kubernetes"
    assert here.run(session, "print(open('file').read())")["stdout"] == "kept\n"
