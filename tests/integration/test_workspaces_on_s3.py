"""Files of sessions on a real S3 server: saved, restored elsewhere, and while it is dead."""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.api import V1, Api, answer, eventually, until
from tests.harness import Server
from tests.integration.test_s3_outage import spooled
from tests.servers.databases import migrate
from tests.servers.redis import RedisServer
from tests.servers.s3 import S3Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.servers.postgres import PostgreSQL

QUICK = {"ATOLL_WORKSPACE__DELAY": "0.1", "ATOLL_POOL__SIZE": "1"}


@pytest.fixture
def server(bubblewrap: str, own_s3: S3Server, tmp_path: Path) -> Iterator[Server]:
    directory = tmp_path / "data"
    directory.mkdir()
    with Server(directory, **own_s3.environment(**QUICK)) as running:
        yield running


@pytest.fixture
def api(server: Server) -> Iterator[Api]:
    with server.client() as http:
        yield Api(http)


def checkpoint(api: Api, session_id: str) -> dict[str, object] | None:
    response = api.http.get(f"{V1}/sessions/{session_id}/checkpoint")
    return None if response.status_code == 404 else answer(response)


def stored(s3: S3Server, session_id: str) -> set[str]:
    """Keys of what the server itself has of a session."""
    prefix = f"atoll/workspaces/{session_id}"
    return {item["path"] for page in s3.store().list(prefix) for item in page}


def codes(api: Api, session_id: str) -> list[str]:
    return [warning["code"] for warning in api.get(session_id)["warnings"]]


def test_changes_by_executions_and_uploads_are_saved_automatically(
    own_s3: S3Server, api: Api
) -> None:
    session = api.create()["id"]
    api.run(session, "open('made', 'w').write('1')")
    eventually(lambda: checkpoint(api, session))
    api.put(session, "uploaded", b"by hand")
    eventually(lambda: (checkpoint(api, session) or {}).get("files") == 2)
    assert stored(own_s3, session)
    assert codes(api, session) == []


def test_a_long_execution_is_saved_while_it_runs(
    bubblewrap: str, own_s3: S3Server, tmp_path: Path
) -> None:
    directory = tmp_path / "long"
    directory.mkdir()
    env = own_s3.environment(**QUICK, ATOLL_WORKSPACE__INTERVAL="1")
    with Server(directory, **env) as server, server.client() as http:
        api = Api(http)
        session = api.create()["id"]
        execution = api.submit(session, "open('begun', 'w').write('1')\n" + until("go"))
        eventually(lambda: checkpoint(api, session), 30)
        api.put(session, "go")
        assert api.result(execution)["status"] == "success"


def test_a_session_continues_from_files_saved_by_another_node(
    bubblewrap: str, postgresql: PostgreSQL, s3: S3Server, tmp_path: Path
) -> None:
    database = postgresql.new_database()
    asyncio.run(migrate(database))
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(tmp_path))
        env = s3.environment(
            ATOLL_BLOB__URL="s3://atoll/nodes",
            ATOLL_DATABASE_URL=database,
            ATOLL_REDIS_URL=redis.url,
            **QUICK,
        )
        nodes = []
        for name in ("one", "two"):
            directory = tmp_path / name
            directory.mkdir()
            labels = {"ATOLL_NODE__LABELS": json.dumps({"name": name})}
            node = stack.enter_context(Server(directory, **env, **labels))
            nodes.append(Api(stack.enter_context(node.client())))
        first, second = nodes
        session = first.create(durability="execution", node_labels={"name": "one"})["id"]
        made = first.run(
            session,
            "import hashlib, os\n"
            "data = os.urandom(20_000_000)\n"
            "open('large', 'wb').write(data)\n"
            "for n in range(500): open(f'small{n}', 'w').write(str(n))\n"
            "print(hashlib.sha256(data).hexdigest())",
        )["stdout"]

        copy = second.create(started_from=session, node_labels={"name": "two"})

        assert copy["runtime_node"] != first.get(session)["runtime_node"]
        seen = second.run(
            copy["id"],
            "import hashlib\n"
            "assert all(open(f'small{n}').read() == str(n) for n in range(500))\n"
            "print(hashlib.sha256(open('large', 'rb').read()).hexdigest())",
        )
        assert seen["stdout"] == made


def test_executions_continue_while_s3_is_unavailable_and_are_saved_later(
    own_s3: S3Server, server: Server, api: Api
) -> None:
    before = api.create(durability="execution")["id"]
    api.run(before, "open('first', 'w').write('1')")
    assert stored(own_s3, before)
    own_s3.kill()

    result = api.run(before, "open('second', 'w').write('2'); print('went on')")
    assert result["stdout"] == "went on\n"
    assert codes(api, before) == ["workspace_not_saved"]
    assert (checkpoint(api, before) or {})["files"] == 2, "saved on the node before its result"
    copied = api.create(started_from=before)["id"]
    assert api.run(copied, "print(open('second').read())")["stdout"] == "2\n"
    new = api.create(durability="execution")
    assert [warning["code"] for warning in new["warnings"]] == ["workspace_not_saved"]
    content = "abc" * 100_000
    api.run(new["id"], f"open('made', 'w').write({content!r})")
    # The spooled files are available to the next session too.
    copy = api.create(started_from=new["id"])["id"]
    assert api.run(copy, "print(len(open('made').read()))")["stdout"] == "300000\n"
    api.end(new["id"])
    kept = api.create(started_from=new["id"])["id"]
    assert api.run(kept, "print(len(open('made').read()))")["stdout"] == "300000\n"

    own_s3.start()
    eventually(lambda: codes(api, before) == [], 60)
    eventually(lambda: any("manifests" in key for key in stored(own_s3, new["id"])), 60)
    eventually(lambda: not spooled(server.data_dir), 60)


def test_a_saved_session_that_ends_while_s3_is_unavailable_loses_nothing(
    own_s3: S3Server, server: Server, api: Api
) -> None:
    session = api.create(durability="execution")["id"]
    api.run(session, "open('kept', 'w').write('1')")
    own_s3.kill()
    api.run(session, "open('kept', 'w').write('2'); open('more', 'w').write('3')")
    api.end(session)

    own_s3.start()
    eventually(lambda: not spooled(server.data_dir), 60)
    later = api.create(started_from=session)["id"]
    shown = api.run(later, "print(open('kept').read(), open('more').read())")
    assert shown["stdout"] == "2 3\n"


def test_unsent_files_survive_a_kill_while_s3_is_unavailable(
    own_s3: S3Server, server: Server, api: Api
) -> None:
    import signal

    session = api.create(durability="execution")["id"]
    own_s3.kill()
    text = hashlib.sha256(b"x").hexdigest() * 1000
    api.run(session, f"open('made', 'w').write({text!r})")
    server.stop(signal.SIGKILL)
    server.start()
    own_s3.start()
    with server.client() as http:
        again = Api(http)
        eventually(lambda: any("manifests" in key for key in stored(own_s3, session)), 60)
        copy = again.create(started_from=session)["id"]
        assert again.run(copy, "print(len(open('made').read()))")["stdout"] == "64000\n"
