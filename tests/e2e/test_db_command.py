"""`atoll db` on every database, and a server's start before and after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from atoll.cli.commands import tree
from atoll.stores.sql.revisions import HEAD
from tests.harness import Server
from tests.servers import free_port
from tests.servers.process import DatabaseServer

SERVERS = ("mariadb", "postgresql")


def atoll(*arguments: str, input: str = "", **env: str) -> Result:
    return CliRunner().invoke(tree(), list(arguments), input=input, env=env)


def current(**env: str) -> tuple[int, str | None, str]:
    """The exit code, the revision and the state that `atoll db current` prints."""
    done = atoll("db", "current", "--json", **env)
    content = json.loads(done.stdout)
    assert content["head"] == HEAD
    return done.exit_code, content["revision"], content["state"]


@pytest.fixture(params=["sqlite", *SERVERS])
def env(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The settings of a server with an empty database."""
    places = {"ATOLL_DATA_DIR": str(tmp_path)}
    if request.param != "sqlite":
        server: DatabaseServer = request.getfixturevalue(request.param)
        places["ATOLL_DATABASE_URL"] = server.new_database()
    return places


@pytest.fixture(params=SERVERS)
def url(request: pytest.FixtureRequest) -> str:
    server: DatabaseServer = request.getfixturevalue(request.param)
    return server.new_database()


@pytest.mark.quick
def test_db_commands_upgrade_downgrade_and_report_the_schema(env: dict[str, str]) -> None:
    assert current(**env) == (1, None, "missing")

    assert atoll("db", "upgrade", "0001", **env).stdout == "base -> 0001\n"
    assert current(**env) == (1, "0001", "outdated")
    assert atoll("db", "upgrade", **env).stdout == f"0001 -> {HEAD}\n"
    assert atoll("db", "upgrade", **env).stdout == f"already at {HEAD}\n"
    assert current(**env) == (0, HEAD, "current")
    assert HEAD in atoll("db", "current", **env).stdout

    down = atoll("db", "downgrade", "0001", "--yes", "--json", **env)
    assert json.loads(down.stdout) == {"before": HEAD, "revision": "0001"}
    assert current(**env) == (1, "0001", "outdated")


def test_a_downgrade_asks_for_confirmation(env: dict[str, str]) -> None:
    assert atoll("db", "upgrade", **env).exit_code == 0

    for answer in ("", "n\n"):
        asked = atoll("db", "downgrade", "base", input=answer, **env)
        assert asked.exit_code == 1
        assert "lose data?" in asked.stderr
    assert current(**env) == (0, HEAD, "current")

    assert atoll("db", "downgrade", "base", input="y\n", **env).stdout == f"{HEAD} -> base\n"


def test_errors_of_db_commands_have_codes(env: dict[str, str], tmp_path: Path) -> None:
    unknown = atoll("db", "upgrade", "0815", **env)
    assert unknown.exit_code == 1
    assert "(unknown_revision)" in unknown.stderr

    nowhere = f"postgresql://atoll:secret-word@127.0.0.1:{free_port()}/atoll"
    for words in (("upgrade",), ("current",), ("downgrade", "base", "--yes")):
        away = atoll("db", *words, "--database-url", nowhere, **env)
        assert away.exit_code == 1
        assert "(database_unavailable)" in away.stderr
        assert "secret-word" not in away.stderr + away.stdout
        assert len(away.stderr.splitlines()) == 1


def test_the_schema_cannot_be_downgraded_while_a_server_runs(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Server(tmp_path) as server, server.client() as client:
        refused = atoll("db", "downgrade", "base", "--yes", "--data-dir", str(tmp_path))
        assert refused.exit_code == 1
        assert "(data_dir_in_use)" in refused.stderr
        assert client.get("/api/v1/sessions").status_code == 200


def test_a_server_refuses_a_database_without_schema_and_names_the_command(
    bubblewrap: str, url: str, tmp_path: Path
) -> None:
    env = {"ATOLL_DATABASE_URL": url, "ATOLL_DATA_DIR": str(tmp_path)}
    for code, prepare in (("schema_missing", None), ("schema_outdated", "0001")):
        if prepare is not None:
            assert atoll("db", "upgrade", prepare, **env).exit_code == 0
        refused = subprocess.run(
            [sys.executable, "-m", "atoll.cli", "serve", "--port", "0"],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **env},
            check=False,
        )
        assert refused.returncode == 1
        assert "atoll db upgrade" in refused.stderr
        assert f"({code})" in refused.stderr

    assert atoll("db", "upgrade", **env).exit_code == 0
    with Server(tmp_path, **env) as server, server.client() as client:
        session = client.post("/api/v1/sessions", json={}).json()
        ran = client.post(
            f"/api/v1/sessions/{session['id']}/execute", json={"code": "print(6 * 7)", "wait": 30}
        )
        assert ran.json()["stdout"] == "42\n"
        client.delete(f"/api/v1/sessions/{session['id']}")
