"""Files of sessions in the blob store, through the API."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from atoll import Atoll
from tests import drivers
from tests.e2e.api import V1, Api, answer, eventually, problem
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.quick

FILES = (
    "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('deep')\nopen('top', 'w').write('1')"
)


@pytest.fixture(scope="module")
def server(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("checkpoints")) as server:
        yield server


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[Api]:
    with server.client() as http:
        yield Api(http)


def path_of(session_id: str) -> str:
    return f"{V1}/sessions/{session_id}/checkpoint"


def kill(server: Server, instance: str) -> None:
    os.kill(drivers.handle(server.data_dir, instance)["child"], signal.SIGKILL)


def lose_workspace(server: Server, session: dict[str, Any]) -> None:
    """As a node does whose disk is gone."""
    instance = session["container_id"]
    workspace = drivers.handle(server.data_dir, instance)["workspace"]
    kill(server, instance)
    found = list((server.data_dir / "node" / "workspaces").glob(f"{workspace}*"))
    assert found
    for each in found:
        shutil.rmtree(each) if each.is_dir() else each.unlink()


@pytest.mark.slow
@pytest.mark.every_driver
def test_a_checkpoint_is_created_on_request(api: Api) -> None:
    session = api.create()["id"]
    problem(api.http.get(path_of(session)), 404, "checkpoint_not_found")
    problem(api.http.post(path_of(session)), 404, "checkpoint_not_found")
    api.run(session, FILES)

    first = answer(api.http.post(path_of(session)))

    assert (first["number"], first["files"], first["size"]) == (1, 2, 5)
    assert first["kept_until"] is None
    assert answer(api.http.get(path_of(session))) == first
    assert answer(api.http.post(path_of(session))) == first
    api.run(session, "open('top', 'w').write('22')")
    assert answer(api.http.post(path_of(session)))["number"] == 2
    problem(api.http.post(path_of("sess_nope")), 404, "session_not_found")


def test_a_session_can_start_from_the_files_of_another(api: Api) -> None:
    first = api.create()["id"]
    api.run(first, FILES)
    second = api.create(started_from=first)
    assert second["started_from"] == first
    assert second["status"] == "running"
    assert api.run(second["id"], "print(open('a/b/c').read())")["stdout"] == "deep\n"
    # Each goes its own way.
    api.run(second["id"], "open('a/b/c', 'w').write('other')")
    assert api.run(first, "print(open('a/b/c').read())")["stdout"] == "deep\n"

    api.end(first)
    third = api.create(started_from=first)["id"]
    assert api.run(third, "print(open('a/b/c').read())")["stdout"] == "deep\n"
    assert answer(api.http.get(path_of(first)))["kept_until"] is not None


def test_a_session_without_files_cannot_be_started_from(api: Api) -> None:
    empty = api.create()["id"]
    refused = api.http.post(f"{V1}/sessions", json={"started_from": empty})
    problem(refused, 404, "checkpoint_not_found")
    refused = api.http.post(f"{V1}/sessions", json={"started_from": "sess_nope"})
    problem(refused, 404, "session_not_found")


@pytest.mark.every_driver
def test_files_lost_with_their_node_are_restored_from_the_checkpoint(
    server: Server, api: Api
) -> None:
    session = api.create()
    api.run(session["id"], FILES)
    answer(api.http.post(path_of(session["id"])))
    api.run(session["id"], "open('later', 'w').write('not saved')")
    lose_workspace(server, session)

    listed = api.run(session["id"], "import json, os; print(json.dumps(os.listdir()))")["stdout"]

    assert set(json.loads(listed)) == {"a", "top", ".tmp"}
    after = api.get(session["id"])
    assert [warning["code"] for warning in after["warnings"]] == ["workspace_restored"]
    assert after["container_id"] != session["container_id"]


def test_a_damaged_checkpoint_is_skipped_for_the_previous_one(server: Server, api: Api) -> None:
    session = api.create()
    blobs = server.data_dir / "blobs" / "workspaces" / session["id"] / "data"
    api.run(session["id"], FILES)
    answer(api.http.post(path_of(session["id"])))
    before = set(blobs.iterdir())
    api.run(session["id"], "open('later', 'w').write('lost'); open('top', 'w').write('2')")
    answer(api.http.post(path_of(session["id"])))
    for path in set(blobs.iterdir()) - before:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    lose_workspace(server, session)

    look = "import json, os; print(json.dumps([sorted(os.listdir()), open('top').read()]))"
    assert json.loads(api.run(session["id"], look)["stdout"]) == [[".tmp", "a", "top"], "1"]

    codes = [warning["code"] for warning in api.get(session["id"])["warnings"]]
    assert codes == ["workspace_restored", "older_backup"]
    # The next save is whole, and so is what comes from it.
    answer(api.http.post(path_of(session["id"])))
    copy = api.create(started_from=session["id"])
    assert api.run(copy["id"], "print(open('a/b/c').read())")["stdout"] == "deep\n"
    assert copy["warnings"] == []

    for path in blobs.iterdir():
        path.unlink()
    lose_workspace(server, api.get(session["id"]))
    problem(api.http.get(f"{V1}/sessions/{session['id']}/files"), 500, "checkpoint_damaged")


def test_with_durability_execution_a_checkpoint_exists_before_the_result(
    server: Server, api: Api
) -> None:
    session = api.create(durability="execution")
    assert session["durability"] == "execution"
    api.run(session["id"], FILES)
    assert answer(api.http.get(path_of(session["id"])))["files"] == 2
    api.run(session["id"], "open('more', 'w').write('x')")
    lose_workspace(server, session)

    assert api.run(session["id"], "print(open('more').read())")["stdout"] == "x\n"


@pytest.mark.every_driver
def test_files_that_user_code_cannot_read_are_saved_too(api: Api) -> None:
    first = api.create()["id"]
    code = (
        "import os\nos.mkdir('shut')\nopen('shut/in', 'w').write('kept')\n"
        "os.chmod('shut/in', 0)\nos.chmod('shut', 0)"
    )
    api.run(first, code)
    second = api.create(started_from=first)["id"]
    look = (
        "import os\nprint(oct(os.stat('shut').st_mode))\nos.chmod('shut', 0o700)\n"
        "print(oct(os.stat('shut/in').st_mode))\nos.chmod('shut/in', 0o600)\n"
        "print(open('shut/in').read())"
    )
    directory, *rest = api.run(second, look)["stdout"].split()
    assert rest == ["0o100000", "kept"]
    # Where a size is watched and not held, a directory has to be open to be looked into.
    watched = drivers.CHOSEN != "local" or os.geteuid() != 0
    assert directory in {"0o40000", *(["0o40700"] if watched else [])}


def test_files_of_an_ended_session_are_removed_after_the_retention_time(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Server(tmp_path, ATOLL_WORKSPACE__KEEP="0") as server, server.client() as http:
        api = Api(http)
        session = api.create()["id"]
        api.run(session, FILES)
        answer(http.post(path_of(session)))
        left = tmp_path / "blobs" / "workspaces" / session
        assert any(left.rglob("*"))
        api.end(session)
        # The record goes last.
        eventually(lambda: http.get(path_of(session)).status_code == 404)
        assert not left.exists()


def test_an_unused_session_leaves_no_checkpoint(server: Server, api: Api) -> None:
    session = api.create()["id"]
    api.end(session)
    eventually(
        lambda: (
            not (server.data_dir / "node" / "instances" / session).exists()
            and api.get(session)["status"] == "terminated"
        )
    )
    problem(api.http.get(path_of(session)), 404, "checkpoint_not_found")


@pytest.mark.slow
@pytest.mark.every_driver
def test_files_of_an_ended_session_can_be_downloaded(api: Api) -> None:
    session = api.create()["id"]
    made = api.run(
        session,
        "import os\nos.makedirs('out')\nopen('out/plot.svg', 'w').write('<svg/>' * 10)\n"
        "os.symlink('out/plot.svg', 'link')\nos.symlink('/etc/passwd', 'away')\n"
        "for n in range(30): open(f'out/{n:02}', 'w').write(str(n))",
    )
    artifacts = answer(api.http.get(f"{V1}/executions/{made['execution_id']}"))["artifacts"]
    (url,) = [item["download_url"] for item in artifacts if item["path"] == "out/plot.svg"]
    assert api.http.get(url, headers={"Authorization": ""}).text == "<svg/>" * 10
    api.end(session)

    files = f"{V1}/sessions/{session}/files"
    assert api.http.get(f"{files}/out/plot.svg").status_code == 200, "though it is being saved"
    assert api.http.get(f"{files}/link").text == "<svg/>" * 10
    part = api.http.get(f"{files}/out/plot.svg", headers={"Range": "bytes=6-11"})
    assert (part.status_code, part.text) == (206, "<svg/>")
    # Without a key, by the link of before.
    assert api.http.get(url, headers={"Authorization": ""}).text == "<svg/>" * 10
    listed: list[str] = []
    cursor = None
    while True:
        params = {"path": "out", "limit": "7"} | ({"cursor": cursor} if cursor else {})
        page = answer(api.http.get(files, params=params))
        listed += [item["name"] for item in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert listed == [*(f"{number:02}" for number in range(30)), "plot.svg"]
    assert api.names(session) == ["away", "link", "out"]
    for path in ("away", "../x", "out/absent", "absent"):
        assert api.http.get(f"{files}/{path}").status_code in (400, 404, 409)
    problem(api.http.put(f"{files}/new", content=b"x"), 409, "session_ended")


def test_a_session_started_right_after_the_end_has_the_latest_files(api: Api) -> None:
    session = api.create()["id"]
    api.run(session, "for n in range(2000): open(str(n), 'w').write('old')")
    answer(api.http.post(path_of(session)))
    api.run(session, "for n in range(2000): open(str(n), 'w').write('last')")
    api.end(session)
    after = api.create(started_from=session)["id"]
    assert api.run(after, "print(open('1999').read())")["stdout"] == "last\n"


def test_the_sdk_and_the_command_line_start_sessions_from_files(server: Server, api: Api) -> None:
    with Atoll(server.url, api_key=server.key) as atoll:
        with atoll.session(durability="execution") as first:
            first.run(FILES)
        with atoll.session(started_from=first.id) as second:
            assert second.files.read_text("a/b/c") == "deep"
            assert second.info.started_from == first.id
    made = server.atoll("session", "create", "--from", first.id)
    assert api.run(made.stdout.strip(), "print(open('top').read())")["stdout"] == "1\n"
