"""Secrets of sessions: there for the code inside, and nowhere else."""

from __future__ import annotations

import base64
import json
import os
import signal
import sqlite3
import subprocess
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.quick

CANARY = "canary-" + os.urandom(12).hex()
SHOW = "import os\nprint(os.environ.get('TOKEN'))"
# Prints whether the secret is set, without its value.
LENGTH = "import os\nprint(len(os.environ['TOKEN']))"


@pytest.fixture
def own(bubblewrap: str, tmp_path: Path) -> Iterator[Server]:
    debug = {"ATOLL_LOG_LEVEL": "debug", "ATOLL_SHUTDOWN_TIMEOUT": "1"}
    debug["ATOLL_SESSION__DISK"] = str(16 * 2**20)  # All of it is searched.
    with Server(tmp_path / "data", **debug) as server:
        yield server


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()


@contextmanager
def calling(server: Server) -> Iterator[Api]:
    with server.client() as http:
        yield Api(http)


def put(api: Api, session_id: str, name: str, value: str) -> list[str]:
    path = f"{V1}/sessions/{session_id}/secrets/{name}"
    names: list[str] = answer(api.http.put(path, json={"value": value}))["items"]
    return names


# What they do


def test_all_code_of_a_session_has_its_secrets(api: Api) -> None:
    session = api.create(secrets={"TOKEN": CANARY})
    assert api.run(session["id"], SHOW)["stdout"] == f"{CANARY}\n"
    assert api.run(session["id"], command=["sh", "-c", "echo $TOKEN"])["stdout"] == f"{CANARY}\n"
    context = answer(api.http.post(f"{V1}/sessions/{session['id']}/contexts", json={}), 201)
    result = api.run(session["id"], SHOW, context_id=context["id"])
    assert result["stdout"] == f"{CANARY}\n"
    api.end(session["id"])


def test_no_response_contains_more_than_names_of_secrets(api: Api) -> None:
    answers = [api.create(secrets={"TOKEN": CANARY, "OTHER": CANARY})]
    session_id = answers[0]["id"]
    answers.append(api.get(session_id))
    answers.append(answer(api.http.get(f"{V1}/sessions")))
    names = answer(api.http.get(f"{V1}/sessions/{session_id}/secrets"))
    result = api.run(session_id, LENGTH)
    answers += [names, result, api.execution(result["execution_id"])]
    answers += [{"events": list(api.events(result["execution_id"]))}, api.end(session_id)]

    assert names["items"] == ["OTHER", "TOKEN"]
    assert answers[0]["secrets"] == ["OTHER", "TOKEN"]
    assert CANARY not in json.dumps(answers)


def test_the_next_execution_sees_a_changed_secret(api: Api, session: str) -> None:
    assert api.run(session, SHOW)["stdout"] == "None\n"
    assert put(api, session, "TOKEN", "one") == ["TOKEN"]
    assert api.run(session, SHOW)["stdout"] == "one\n"
    put(api, session, "TOKEN", "two")
    assert api.run(session, SHOW)["stdout"] == "two\n"
    gone = api.http.delete(f"{V1}/sessions/{session}/secrets/TOKEN")
    assert answer(gone)["items"] == []
    assert api.run(session, SHOW)["stdout"] == "None\n"


def test_a_missing_secret_cannot_be_removed(api: Api, session: str) -> None:
    gone = api.http.delete(f"{V1}/sessions/{session}/secrets/TOKEN")
    problem(gone, 404, "secret_not_found")
    lost = api.http.get(f"{V1}/sessions/nobody/secrets")
    problem(lost, 404, "session_not_found")


def test_an_ended_session_takes_no_secrets(api: Api) -> None:
    session = api.create()["id"]
    api.end(session)
    path = f"{V1}/sessions/{session}/secrets/TOKEN"
    refused = api.http.put(path, json={"value": CANARY})
    problem(refused, 409, "session_ended")


@pytest.mark.parametrize(
    "fields",
    [
        {"secrets": {"TOKEN": CANARY + "\0"}},
        {"secrets": {"TOKEN": CANARY * 3000}},
        {"secrets": {"TOKEN": {"is": CANARY}}},
        {"secrets": {"TOKEN": [CANARY]}},
        {"secrets": {"not a name": CANARY}},
        {"secrets": CANARY},
        {"secrets": {f"N{number}": CANARY for number in range(257)}},
        {"secrets": {f"N{number}": CANARY * 1500 for number in range(32)}},
        {"secrets": {"TOKEN": CANARY}, "env_vars": {"TOKEN": "here too"}},
        {"secrets": {"TOKEN": CANARY}, "no_such_field": CANARY},
        {"secrets": {"TOKEN": CANARY}, "timeout": -1},
    ],
    ids=["nul", "long", "object", "list", "name", "text", "many", "all", "twice", "field", "life"],
)
def test_a_refused_secret_is_not_repeated(api: Api, fields: dict[str, Any]) -> None:
    refused = api.http.post(f"{V1}/sessions", json=fields)
    assert refused.status_code == 422
    assert CANARY not in refused.text


def test_a_secret_that_is_not_text_is_refused_and_not_repeated(api: Api, session: str) -> None:
    path = f"{V1}/sessions/{session}/secrets/TOKEN"
    for body in ({"value": [CANARY]}, {"value": CANARY + "\0"}, {"valeu": CANARY}, CANARY):
        refused = api.http.put(path, json=body)
        assert refused.status_code == 422
        assert CANARY not in refused.text
    broken = api.http.put(path, content=f'{{"value": "{CANARY}')
    assert broken.status_code == 400
    assert CANARY not in broken.text


def test_a_secret_named_like_a_variable_is_refused(api: Api) -> None:
    session = api.create(env_vars={"TOKEN": "open"})["id"]
    refused = api.http.put(f"{V1}/sessions/{session}/secrets/TOKEN", json={"value": CANARY})
    assert problem(refused, 422, "invalid_request")["field"] == "secrets.TOKEN"
    api.end(session)


def test_the_largest_secrets_fit(api: Api) -> None:
    secrets = {f"N{number}": "x" * 65536 for number in range(15)}
    session = api.create(secrets=secrets)["id"]
    result = api.run(session, command=["sh", "-c", "echo ${#N0} ${#N14}"])
    assert result["stdout"] == "65536 65536\n"
    api.end(session)


def test_the_openapi_document_marks_secrets_as_write_only(api: Api) -> None:
    schemas = answer(api.http.get("/openapi.json"))["components"]["schemas"]
    assert schemas["CreateSession"]["properties"]["secrets"]["writeOnly"] is True
    assert schemas["SecretIn"]["properties"]["value"]["writeOnly"] is True


# Where they are not


def _files_with(text: str, root: Path) -> list[str]:
    wanted = [text.encode(), base64.b64encode(text.encode())[:-4], text.encode().hex().encode()]
    found = []
    for place, _, names in os.walk(root):
        for path in (Path(place, name) for name in names):
            if path.is_file() and not path.is_symlink():
                with suppress(FileNotFoundError):
                    data = path.read_bytes()
                    found += [str(path) for form in wanted if form in data]
    return found


def _command_lines_with(text: str) -> list[str]:
    """Of every process of the host: sandboxes' too."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue  # It ended.
        if text.encode() in line:
            found.append(str(path))
    return found


@pytest.mark.slow
def test_neither_disk_nor_logs_nor_process_lists_contain_secrets(own: Server) -> None:
    with calling(own) as api:
        key = {"Idempotency-Key": "once"}
        body = {"secrets": {"TOKEN": CANARY}}
        first = api.http.post(f"{V1}/sessions", json=body, headers=key)
        again = api.http.post(f"{V1}/sessions", json=body, headers=key)
        assert answer(first, 201)["id"] == answer(again, 201)["id"]
        session = first.json()["id"]
        put(api, session, "LATER", CANARY)
        answer(api.http.post(f"{V1}/sessions/{session}/contexts", json={}), 201)
        assert api.run(session, LENGTH)["stdout"] == f"{len(CANARY)}\n"
        crashed = "import os, signal\nassert os.environ['TOKEN']\nos.kill(os.getpid(), 11)"
        assert api.run(session, crashed)["signal"] is not None
        running = api.submit(session, "import os, time\nos.environ['TOKEN']\ntime.sleep(60)")
        api.await_status(running, "running")
        inside = (
            "import glob\nfor path in glob.glob('/proc/[0-9]*/cmdline'):\n"
            "    print(open(path).read())"
        )
        other = api.create()["id"]
        assert CANARY not in api.run(other, inside)["stdout"]
        assert _command_lines_with(CANARY) == []

        own.stop(signal.SIGKILL)
        assert _files_with(CANARY, own.data_dir) == []
        own.start()
    with calling(own) as api:
        eventually(lambda: api.status(running) == "running")
        assert _files_with(CANARY, own.data_dir) == []
        api.http.delete(f"{V1}/executions/{running}")
        api.result(running)
        assert api.run(session, LENGTH)["stdout"] == f"{len(CANARY)}\n"
    assert _command_lines_with(CANARY) == []
    assert CANARY not in own.stderr()
    with closing(sqlite3.connect(own.data_dir / "atoll.db")) as database:
        assert CANARY not in "\n".join(database.iterdump())


@pytest.mark.slow
def test_a_secret_moved_to_another_session_or_name_cannot_be_decrypted(own: Server) -> None:
    with calling(own) as api:
        victim = api.create(secrets={"TOKEN": CANARY})["id"]
        thief = api.create(secrets={"TOKEN": "mine"})["id"]
    own.stop()
    with closing(sqlite3.connect(own.data_dir / "atoll.db")) as database:
        database.execute(
            "UPDATE sessions SET secrets = (SELECT secrets FROM sessions WHERE id = ?) "
            "WHERE id = ?",
            (victim, thief),
        )
        database.commit()
    own.start()
    with calling(own) as api:
        result = api.run(thief, SHOW)
        assert result["error"]["code"] == "secret_unreadable"
        assert CANARY not in json.dumps(result)
        assert api.run(victim, LENGTH)["stdout"] == f"{len(CANARY)}\n"


@pytest.mark.slow
def test_without_its_key_a_session_runs_nothing_until_the_secret_is_set_again(own: Server) -> None:
    with calling(own) as api:
        session = api.create(secrets={"TOKEN": CANARY})["id"]
        api.put(session, "file", b"kept")
    own.stop()
    (own.data_dir / "secret-key").rename(own.data_dir.parent / "away")
    own.start()
    with calling(own) as api:
        result = api.run(session, LENGTH)
        assert (result["status"], result["error"]["code"]) == ("failed", "secret_unreadable")
        assert "old_keys" in result["error"]["message"]
        refused = api.http.post(f"{V1}/sessions/{session}/contexts", json={})
        problem(refused, 500, "secret_unreadable")
        assert api.names(session) == ["file"]
        put(api, session, "TOKEN", "anew")
        assert api.run(session, SHOW)["stdout"] == "anew\n"


@pytest.mark.slow
def test_the_key_can_be_replaced_while_secrets_are_stored(bubblewrap: str, tmp_path: Path) -> None:
    old, new = os.urandom(32).hex(), base64.b64encode(os.urandom(32)).decode()
    data = tmp_path / "data"
    with Server(data, ATOLL_SECRETS__KEY=old) as server:
        with calling(server) as api:
            session = api.create(secrets={"TOKEN": CANARY}, timeout=600)["id"]
        server.stop()
        rotated = Server(data, ATOLL_SECRETS__KEY=new, ATOLL_SECRETS__OLD_KEYS=old)
        with rotated, calling(rotated) as api:
            assert api.run(session, LENGTH)["stdout"] == f"{len(CANARY)}\n"
        assert not (data / "secret-key").exists()
        for key in (old, new):
            assert _files_with(key, data) == []


def test_an_external_database_needs_the_key_in_the_settings(
    bubblewrap: str, tmp_path: Path
) -> None:
    url = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    with Server(tmp_path / "data", ATOLL_DATABASE_URL=url) as server, calling(server) as api:
        refused = api.http.post(f"{V1}/sessions", json={"secrets": {"TOKEN": CANARY}})
        error = problem(refused, 422, "secrets_not_configured")
        assert error["setting"] == "secrets.key"
        assert CANARY not in refused.text
        api.create()


# The command line


def test_the_command_line_reads_secrets_only_from_the_environment_and_files(
    server: Server, api: Api, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text(f"{CANARY}-of-a-file\n")

    def create(*arguments: str) -> subprocess.CompletedProcess[str]:
        return server.atoll("session", "create", "--json", *arguments, TOKEN=CANARY)

    done = create("--secret", "TOKEN", "--secret-file", f"OTHER={tmp_path / 'file'}")
    assert done.returncode == 0, done.stderr
    assert CANARY not in done.stdout + done.stderr
    session = json.loads(done.stdout)
    assert session["secrets"] == ["OTHER", "TOKEN"]
    result = api.run(session["id"], command=["sh", "-c", "echo $TOKEN; echo $OTHER"])
    assert result["stdout"] == f"{CANARY}\n{CANARY}-of-a-file\n"
    api.end(session["id"])

    refused = create("--secret", "TOKEN=on-the-command-line")
    assert refused.returncode == 2
    assert "--secret-file" in refused.stderr
    not_set = create("--secret", "NOT_SET_ANYWHERE")
    assert not_set.returncode == 2
    assert "NOT_SET_ANYWHERE is not set" in " ".join(not_set.stderr.split())
