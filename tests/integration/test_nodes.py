"""
Nodes that are lost, recover or are drained: sessions continue on other nodes with their files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.api import V1, answer, eventually, problem, sh, until
from tests.integration.nodes import Fleet
from tests.integration.replicas import LONG

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers.mariadb import MariaDB
    from tests.servers.s3 import S3Server

SAVED = {"durability": "execution", "timeout": 3600}
"""Files changed by an execution are in the bucket before its result is returned."""


def fleet(place: Path, s3: S3Server, **options: Any) -> Fleet:
    blobs = s3.environment(ATOLL_BLOB__URL=f"s3://atoll/{place.name}")
    return Fleet(place, blobs=blobs, **options)


def warnings(session: dict[str, Any]) -> set[str]:
    return {item["code"] for item in session["warnings"]}


@pytest.mark.parametrize("database", ["sqlite", "mariadb"])
def test_sessions_of_a_killed_node_continue_on_another_with_their_files(
    bubblewrap: str, s3: S3Server, tmp_path: Path, database: str, request: pytest.FixtureRequest
) -> None:
    url = None
    if database == "mariadb":
        server: MariaDB = request.getfixturevalue("mariadb")
        url = server.new_database()
    with fleet(tmp_path, s3, database_url=url) as nodes:
        lost, other = nodes[0], nodes[1]
        first = nodes.create_on(lost, **SAVED)
        second = nodes.create_on(lost, **SAVED)
        assert nodes.node_of(first) is nodes.node_of(second) is lost
        sh(lost.api, first, "echo one > kept; mkdir -p a/b; echo deep > a/b/c")
        sh(lost.api, second, "echo two > kept")
        before = lost.instances()
        assert len(before) == 2

        lost.kill()
        for session in (first, second):
            assert nodes.wait_for_move(session, lost) is other
        eventually(lambda: other.api.get(first)["status"] == "running", LONG)
        assert sh(other.api, first, "cat kept a/b/c") == "one\ndeep\n"
        assert sh(other.api, second, "cat kept") == "two\n"
        assert "memory_lost" in warnings(other.api.get(first))
        reported = nodes.nodes_by_id(other.api)[lost.id]
        assert (reported["status"], reported["cordoned"]) == ("unhealthy", False)
        assert reported["problem"]

        # Its instances still run: it recovers and removes them at once.
        assert lost.instances() == before
        lost.start()
        eventually(lambda: not lost.instances() & before, LONG)
        eventually(lambda: nodes.nodes_by_id(other.api)[lost.id]["status"] == "healthy", LONG)
        assert sh(other.api, first, "cat kept") == "one\n"


def test_executions_of_a_killed_node_are_retried_on_another(
    bubblewrap: str, s3: S3Server, tmp_path: Path
) -> None:
    with fleet(tmp_path, s3) as nodes:
        lost, other = nodes[0], nodes[1]
        session = nodes.create_on(lost, **SAVED)
        sh(lost.api, session, "echo kept > file")
        code = until("go") + "print(open('file').read())"
        under_way = lost.api.submit(session, code, timeout=600)
        queued = lost.api.submit(session, "print('after')", timeout=60)
        lost.api.await_status(under_way, "running")
        lost.kill()

        nodes.wait_for_move(session, lost)
        go = f"{V1}/sessions/{session}/files/go"
        eventually(lambda: other.api.http.put(go, content=b"").status_code == 201, LONG)
        result = other.api.result(under_way, wait=LONG)
        assert (result["status"], result["stdout"]) == ("success", "kept\n\n"), result
        assert other.api.result(queued, wait=LONG)["stdout"] == "after\n"
        assert other.api.execution(under_way)["retry_count"] == 1


def test_a_suspended_node_removes_its_moved_sessions_when_it_resumes(
    bubblewrap: str, s3: S3Server, tmp_path: Path
) -> None:
    with fleet(tmp_path, s3) as nodes:
        lost, other = nodes[0], nodes[1]
        session = nodes.create_on(lost, **SAVED)
        sh(lost.api, session, "echo kept > file")
        before = lost.instances()
        lost.pause()
        nodes.wait_for_move(session, lost)
        assert sh(other.api, session, "cat file; echo more >> file") == "kept\n"
        lost.resume()
        eventually(lambda: not lost.instances() & before, LONG)
        eventually(lambda: nodes.nodes_by_id(other.api)[lost.id]["status"] == "healthy", LONG)
        assert sh(other.api, session, "cat file") == "kept\nmore\n"
        assert nodes.node_of(session) is other


def test_a_drained_node_moves_its_sessions_and_can_be_deleted(
    bubblewrap: str, s3: S3Server, tmp_path: Path
) -> None:
    with fleet(tmp_path, s3) as nodes:
        drained, other = nodes[0], nodes[1]
        made = [nodes.create_on(drained, timeout=3600) for _ in range(4)]
        for number, session in enumerate(made):
            sh(drained.api, session, f"echo {number} > file")
        busy = drained.api.submit(made[0], until("go") + "print('done')", timeout=600)
        drained.api.await_status(busy, "running")
        problem(other.api.http.delete(f"{V1}/nodes/{drained.id}"), 409, "node_in_use")

        response = answer(other.api.http.post(f"{V1}/nodes/{drained.id}/drain"), 202)
        assert response["cordoned"]
        assert response["drain"]["total"] == 4
        drained.api.put(made[0], "go")
        eventually(lambda: nodes.nodes_by_id(other.api)[drained.id]["drain"]["left"] == 0, LONG)
        # What ran had the time to end.
        result = other.api.result(busy, wait=LONG)
        assert (result["status"], result["stdout"]) == ("success", "done\n")
        assert other.api.execution(busy)["retry_count"] == 0
        for number, session in enumerate(made):
            assert nodes.node_of(session) is other
            assert sh(other.api, session, "cat file") == f"{number}\n"
        eventually(lambda: not drained.instances() and not drained.workspaces(), LONG)

        shown = nodes.command("node", "show", drained.id, url=other.url)
        assert "drain" in shown
        answer(other.api.http.post(f"{V1}/nodes/{drained.id}/uncordon"))
        response = nodes.nodes_by_id(other.api)[drained.id]
        assert (response["cordoned"], response["drain"]) == (False, None)

        drained.stop()
        eventually(lambda: nodes.nodes_by_id(other.api)[drained.id]["status"] == "unhealthy", LONG)
        assert other.api.http.delete(f"{V1}/nodes/{drained.id}").status_code == 204
        assert list(nodes.nodes_by_id(other.api)) == [other.id]


def test_an_execution_that_outlasts_the_drain_grace_is_retried_on_the_next_node(
    bubblewrap: str, s3: S3Server, tmp_path: Path
) -> None:
    with fleet(tmp_path, s3, ATOLL_NODE__DRAIN_GRACE="0.5") as nodes:
        drained, other = nodes[0], nodes[1]
        session = nodes.create_on(drained, timeout=3600)
        code = (
            "import os, time\n"
            "again = os.path.exists('/workspace/begun')\n"
            "open('/workspace/begun', 'w').close()\n"
            "time.sleep(0 if again else 600)\n"
            "print('again', again)"
        )
        busy = drained.api.submit(session, code, timeout=900)
        eventually(lambda: "begun" in drained.api.names(session), LONG)
        answer(other.api.http.post(f"{V1}/nodes/{drained.id}/drain"), 202)
        nodes.wait_for_move(session, drained)
        result = other.api.result(busy, wait=LONG)
        assert (result["status"], result["stdout"]) == ("success", "again True\n"), result
        # A client that waits at the submitting node receives the result too.
        assert drained.api.result(busy, wait=LONG)["stdout"] == "again True\n"


def test_without_shared_blobs_no_session_moves(bubblewrap: str, tmp_path: Path) -> None:
    with Fleet(tmp_path) as nodes:
        lost, other = nodes[0], nodes[1]
        session = nodes.create_on(lost, timeout=3600)
        sh(lost.api, session, "echo kept > file")
        problem(other.api.http.post(f"{V1}/nodes/{lost.id}/drain"), 409, "drain_unavailable")
        lost.kill()
        eventually(lambda: nodes.nodes_by_id(other.api)[lost.id]["status"] == "unhealthy", LONG)
        probed = nodes.nodes_by_id(other.api)[lost.id]["failure_count"]
        eventually(
            lambda: nodes.nodes_by_id(other.api)[lost.id]["failure_count"] > probed + 2, LONG
        )
        assert nodes.node_of(session) is lost
        problem(other.api.http.delete(f"{V1}/nodes/{lost.id}"), 409, "node_in_use")
        lost.start()
        eventually(lambda: nodes.nodes_by_id(other.api)[lost.id]["status"] == "healthy", LONG)
        assert sh(lost.api, session, "cat file") == "kept\n"


def test_a_session_with_a_volume_on_a_lost_node_waits_with_a_warning(
    bubblewrap: str, s3: S3Server, tmp_path: Path
) -> None:
    with fleet(tmp_path, s3) as nodes:
        lost, other = nodes[0], nodes[1]
        answer(
            lost.api.http.post(
                f"{V1}/volumes", json={"id": "data", "kind": "local", "size": "16Mi"}
            ),
            201,
        )
        volume = {"volume_id": "data", "path": "/data/x", "read_only": False}
        session = nodes.create_on(lost, volumes=[volume], timeout=3600)
        sh(lost.api, session, "echo kept > /data/x/file")
        lost.kill()

        def waits() -> bool:
            return "waits_for_node" in warnings(other.api.get(session))

        eventually(waits, LONG)
        assert nodes.node_of(session) is lost
        lost.start()
        eventually(lambda: not waits(), LONG)
        assert sh(lost.api, session, "cat /data/x/file") == "kept\n"


def test_a_single_node_keeps_its_sessions(bubblewrap: str, s3: S3Server, tmp_path: Path) -> None:
    with fleet(tmp_path, s3, size=1) as nodes:
        (alone,) = nodes.nodes
        session = nodes.create_on(alone, timeout=3600)
        problem(alone.api.http.post(f"{V1}/nodes/{alone.id}/drain"), 409, "drain_unavailable")
        alone.kill()
        alone.start()
        assert alone.api.get(session)["runtime_node"] == alone.id
        assert sh(alone.api, session, "echo fine") == "fine\n"
