"""
Two Docker engines as two nodes: one on this machine, and one over TLS as if it was remote.

Sessions are placed on both, leave a drained node, and continue when a node is lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from atoll.drivers.docker.labels import Label
from tests.e2e.api import V1, answer, eventually, sh
from tests.integration.nodes import Fleet, FleetNode
from tests.integration.replicas import LONG
from tests.servers.docker import Dockerd
from tests.servers.images import PYTHON, Archives
from tests.servers.s3 import S3Server

SAVED = {"durability": "execution", "timeout": 3600}


class EngineNode(FleetNode):
    """Asks its engine which instances and workspaces exist."""

    engine: Dockerd

    def instances(self) -> set[str]:
        found = self.engine.containers(label=[Label.INSTANCE])
        return {one["Labels"][Label.INSTANCE] for one in found}

    def workspaces(self) -> set[str]:
        volumes = self.engine.ask("GET", "/volumes").json()["Volumes"] or []
        kept = {
            one["Labels"][Label.WORKSPACE]
            for one in volumes
            if Label.WORKSPACE in (one["Labels"] or {})
        }
        directory = self.data_dir / "node" / "workspaces"
        return kept | ({path.name for path in directory.iterdir()} if directory.is_dir() else set())


class Engines(Fleet):
    nodes: list[EngineNode]  # type: ignore[assignment]

    def __init__(self, place: Path, s3: S3Server, engines: list[Dockerd]) -> None:
        super().__init__(
            place,
            size=0,
            blobs=s3.environment(ATOLL_BLOB__URL=f"s3://atoll/{place.name}"),
            ATOLL_DRIVER="docker",
            ATOLL_DOCKER__IMAGE=PYTHON,
            ATOLL_DOCKER__TIMEOUT="10",
        )
        for number, engine in enumerate(engines):
            data_dir = place / f"node-{number}"
            data_dir.mkdir()
            where = {"url": engine.url} if engine.port is None else engine.over_tls
            own = {f"ATOLL_DOCKER__{name.upper()}": value for name, value in where.items()}
            node = EngineNode(data_dir, f"node-{number}", **self._env, **own)
            node.engine = engine
            self.nodes.append(node)

    def __getitem__(self, number: int) -> EngineNode:
        return self.nodes[number]

    def _abandon(self) -> None:
        for one in self.nodes:
            if one.up:
                one.kill()  # Its containers end with its engine.
        self.redis.kill()


@pytest.fixture
def engines(image_archives: Archives, tmp_path: Path) -> Iterator[list[Dockerd]]:
    with ExitStack() as stack:
        found = []
        for number, tls in enumerate((False, True)):
            directory = tmp_path / f"engine-{number}"
            directory.mkdir()
            found.append(image_archives.load(stack.enter_context(Dockerd(directory, tls=tls))))
        yield found


def problem_of(nodes: Engines, asked: EngineNode, about: EngineNode) -> dict[str, Any]:
    return nodes.nodes_by_id(asked.api)[about.id]


def test_sessions_use_both_engines_and_leave_a_drained_one(
    engines: list[Dockerd], s3: S3Server, tmp_path: Path
) -> None:
    with Engines(tmp_path, s3, engines) as nodes:
        here, there = nodes[0], nodes[1]
        reported = nodes.nodes_by_id(here.api)
        assert {one["type"] for one in reported.values()} == {"docker"}
        made = [here.api.create(timeout=3600)["id"] for _ in range(4)]
        made.append(nodes.create_on(there, timeout=3600))
        made.append(nodes.create_on(here, timeout=3600))
        assert {nodes.node_of(session) for session in made} == {here, there}
        for number, session in enumerate(made):
            # Through any node, wherever the session is.
            assert sh(here.api, session, f"echo {number} > file; cat file") == f"{number}\n"
            assert sh(there.api, session, "cat file") == f"{number}\n"
        assert here.instances()
        assert there.instances()

        answer(here.api.http.post(f"{V1}/nodes/{there.id}/drain"), 202)
        eventually(lambda: problem_of(nodes, here, there)["drain"]["left"] == 0, LONG)
        for number, session in enumerate(made):
            assert nodes.node_of(session) is here
            assert sh(there.api, session, "cat file") == f"{number}\n"
        eventually(lambda: not there.instances() and not there.workspaces(), LONG)
        answer(here.api.http.post(f"{V1}/nodes/{there.id}/uncordon"))

        # Then back, from directories to volumes.
        answer(there.api.http.post(f"{V1}/nodes/{here.id}/drain"), 202)
        eventually(lambda: problem_of(nodes, there, here)["drain"]["left"] == 0, LONG)
        for number, session in enumerate(made):
            assert nodes.node_of(session) is there
            assert sh(there.api, session, "cat file") == f"{number}\n"
        answer(there.api.http.post(f"{V1}/nodes/{here.id}/uncordon"))


@pytest.mark.parametrize("number", [0, 1], ids=["here", "there"])
def test_sessions_leave_a_lost_engine_and_it_recovers(
    engines: list[Dockerd], s3: S3Server, tmp_path: Path, number: int
) -> None:
    with Engines(tmp_path, s3, engines) as nodes:
        lost, other = nodes[number], nodes[1 - number]
        saved = nodes.create_on(lost, **SAVED)
        sh(lost.api, saved, "echo kept > file")

        lost.engine.kill()
        eventually(lambda: problem_of(nodes, other, lost)["status"] == "unhealthy", LONG)
        assert "Docker engine" in problem_of(nodes, other, lost)["problem"]
        # Its own control plane is alive and reports the same.
        assert lost.api.http.get("/health").status_code == 200
        assert problem_of(nodes, lost, lost)["status"] == "unhealthy"
        # New sessions go to the node with an engine, through any node.
        for asked in (lost, other):
            session = asked.api.create(timeout=3600)["id"]
            assert nodes.node_of(session) is other
            assert sh(asked.api, session, "echo new") == "new\n"
        assert nodes.wait_for_move(saved, lost) is other
        assert sh(other.api, saved, "cat file; echo more >> file") == "kept\n"

        lost.engine.start()
        eventually(lambda: problem_of(nodes, other, lost)["status"] == "healthy", LONG)
        # Remains of sessions that have moved are removed.
        eventually(lambda: not lost.instances(), LONG)
        assert sh(lost.api, saved, "cat file") == "kept\nmore\n"
        back = nodes.create_on(lost, timeout=3600)
        assert sh(other.api, back, "echo back") == "back\n"


def test_sessions_continue_after_a_restart_of_their_only_engine(
    engines: list[Dockerd], s3: S3Server, tmp_path: Path
) -> None:
    for number in (0, 1):
        directory = tmp_path / f"fleet-{number}"
        directory.mkdir()
        with Engines(directory, s3, engines[number : number + 1]) as nodes:
            (alone,) = nodes.nodes
            session = nodes.create_on(alone, timeout=3600)
            sh(alone.api, session, "echo kept > file")
            alone.engine.restart()
            assert sh(alone.api, session, "cat file") == "kept\n"
            alone.engine.kill()
            alone.engine.start()
            assert sh(alone.api, session, "cat file") == "kept\n"
