"""Python packages of sessions' own, from a real index over loopback to `import` inside."""

from __future__ import annotations

import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from atoll import Atoll, InvalidRequest
from tests.e2e.api import V1, Api, answer, eventually, problem
from tests.harness import Server
from tests.servers.index import Index

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def index() -> Iterator[Index]:
    with Index(password="index-password") as running:
        running.add("greet", "1.0").add(
            "greet", "1.2", requires=["lower>=1"], scripts={"hello-greet": "greet:main"}
        )
        running.add("lower", "1.0").add("lower", "2.0")
        running.add("fancy", "1.0", extras={"loud": ["lower<2"]})
        running.add("needs-other-pip", "1.0", requires=["pip>=9000"]).add("pip", "9001.0")
        running.add("needs-nothing-there", requires=["not-on-the-index"])
        running.add_source("only-source")
        yield running


@pytest.fixture(scope="module")
def server(
    bubblewrap: str, index: Index, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("server")
    with Server(directory, ATOLL_PACKAGES__INDEX_URL=index.url) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[Api]:
    with server.client() as http:
        yield Api(http)


def wanted(*requirements: str) -> list[dict[str, str]]:
    """`name` or `name==version` and so on, as the API has them."""
    listed = []
    for each in requirements:
        name = re.split("[<>~!=]", each)[0]
        listed.append({"name": name, **({"version": each[len(name) :]} if each != name else {})})
    return listed


def refused(api: Api, status: int, code: str, **fields: Any) -> dict[str, Any]:
    return problem(api.http.post(f"{V1}/sessions", json=fields), status, code)


def log_of(api: Api, session_id: str) -> str:
    response = api.http.get(f"{V1}/sessions/{session_id}/dependencies/log")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain")
    return response.text


def add(api: Api, session_id: str, *requirements: str, **fields: Any) -> httpx.Response:
    body = {"dependencies": wanted(*requirements), **fields}
    return api.http.post(f"{V1}/sessions/{session_id}/dependencies", json=body)


# Finding them


@pytest.fixture(scope="module")
def equipped(api: Api) -> Iterator[str]:
    session = api.create(dependencies=wanted("greet>=1.1"))
    assert session["status"] == "running"
    yield str(session["id"])
    api.end(session["id"])


@pytest.mark.parametrize(
    "fields",
    [
        {"code": "import greet, lower; print(greet.version, lower.version)"},
        {"command": ["python3", "-c", "import greet, lower; print(greet.version, lower.version)"]},
        {"code": "python3 -c 'import greet as g, lower as l; print(g.version, l.version)'",
         "language": "shell"},
    ],
    ids=["code", "command", "shell"],
)  # fmt: skip
def test_all_python_code_finds_the_packages_and_their_dependencies(
    api: Api, equipped: str, fields: dict[str, Any]
) -> None:
    assert api.run(equipped, **fields)["stdout"] == "1.2 2.0\n"


def test_a_context_finds_the_packages(api: Api, equipped: str) -> None:
    context = answer(api.http.post(f"{V1}/sessions/{equipped}/contexts", json={}), 201)
    result = api.run(equipped, "import greet; print(greet.version)", context_id=context["id"])
    assert result["stdout"] == "1.2\n", result


def test_programs_of_packages_are_on_the_path(api: Api, equipped: str) -> None:
    assert api.run(equipped, command=["hello-greet"])["stdout"] == "greet 1.2\n"
    assert api.run(equipped, "hello-greet", language="shell")["stdout"] == "greet 1.2\n"


def test_files_and_variables_of_the_user_take_precedence(api: Api, equipped: str) -> None:
    api.put(equipped, "mine/greet.py", b"version = 'mine'")
    code = "import greet, lower; print(greet.version, lower.version)"
    env = {"PYTHONPATH": "/workspace/mine", "PATH": "/usr/bin:/bin"}
    assert api.run(equipped, code, env=env)["stdout"] == "mine 2.0\n"
    printed = api.run(equipped, "import os; print(os.environ['PATH'])", env=env)["stdout"]
    assert printed.startswith("/usr/bin:/bin:/opt/atoll/packages/")


def test_versions_and_the_log_can_be_read(api: Api, equipped: str) -> None:
    response = answer(api.http.get(f"{V1}/sessions/{equipped}/dependencies"))
    assert response == {
        "status": "installed",
        "requested": ["greet>=1.1"],
        "installed": ["greet==1.2", "lower==2.0"],
        "message": None,
    }
    assert api.get(equipped)["dependencies"] == response
    log = log_of(api, equipped)
    assert "Looking for greet>=1.1." in log
    assert "Installed: greet==1.2 lower==2.0" in log


def test_the_password_and_address_of_the_index_are_never_shown(
    api: Api, equipped: str, server: Server, index: Index
) -> None:
    failed = refused(api, 422, "dependency_failed", dependencies=wanted("not-on-the-index"))
    log = log_of(api, equipped) + log_of(api, failed["session_id"]) + str(failed)
    log += api.run(equipped, "import os; print(os.environ)")["stdout"] + server.stderr()
    assert "index-password" not in log
    assert f":{index.port}" not in log


def test_extras_bring_their_packages(api: Api) -> None:
    session = api.create(dependencies=wanted("fancy[loud]"))
    assert session["dependencies"]["installed"] == ["fancy==1.0", "lower==1.0"]
    api.end(session["id"])


def test_a_session_without_packages_has_an_empty_list(api: Api) -> None:
    session = api.create()["id"]
    response = answer(api.http.get(f"{V1}/sessions/{session}/dependencies"))
    assert (response["requested"], response["installed"]) == ([], [])
    assert log_of(api, session) == ""
    assert api.run(session, "import greet")["exit_code"] == 1
    api.end(session)


# The cache


def test_a_cached_set_needs_no_index_and_uses_a_ready_instance(
    api: Api, equipped: str, index: Index, server: Server
) -> None:
    eventually(lambda: api.pool()["python"] >= 1)
    asked = len(index.asked)
    installs = set((server.data_dir / "node" / "installs").iterdir())
    taken = api.pools()["python"]["hits"]
    session = api.create(dependencies=[{"name": "Greet", "version": " >= 1.1"}])
    assert session["status"] == "running"
    assert len(index.asked) == asked
    assert set((server.data_dir / "node" / "installs").iterdir()) == installs
    assert api.pools()["python"]["hits"] == taken + 1
    assert api.run(session["id"], "import greet; print(greet.version)")["stdout"] == "1.2\n"
    assert "nothing was installed" in log_of(api, session["id"])
    api.end(session["id"])


def test_concurrent_sessions_share_one_installation(api: Api, index: Index) -> None:
    index.add("popular", "3.0")
    held = index.hold("/files/popular-3.0-py3-none-any.whl")
    with ThreadPoolExecutor(4) as threads:
        making = [threads.submit(api.create, dependencies=wanted("popular==3.0")) for _ in range(4)]
        assert held.asked.wait(30)
        held.go.set()
        sessions = [future.result(60) for future in making]
    assert {session["status"] for session in sessions} == {"running"}
    assert index.asked.count("/files/popular-3.0-py3-none-any.whl") == 1
    for session in sessions:
        assert api.run(session["id"], "import popular")["exit_code"] == 0
        api.end(session["id"])


# During an installation


def test_an_installation_can_be_followed(api: Api, index: Index) -> None:
    index.add("slow", "1.0")
    held = index.hold("/files/slow-1.0-py3-none-any.whl")
    response = api.http.post(f"{V1}/sessions?wait=0", json={"dependencies": wanted("slow")})
    session = answer(response, 201)
    assert session["status"] == "creating"
    assert session["dependencies"]["status"] == "installing"
    assert held.asked.wait(30)
    assert api.get(session["id"])["status"] == "creating"
    eventually(lambda: "Looking for slow" in log_of(api, session["id"]))
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(api.run, session["id"], "import slow; print(slow.version)")
        held.go.set()
        assert running.result(60)["stdout"] == "1.0\n"
    assert api.get(session["id"])["status"] == "running"
    api.end(session["id"])


@pytest.mark.slow
def test_an_installation_interrupted_by_a_kill_is_finished_after_the_next_start(
    bubblewrap: str, tmp_path: Path
) -> None:
    with Index() as index:
        index.add("greet", "1.0")
        held = index.hold("/files/greet-1.0-py3-none-any.whl")
        with Server(tmp_path, ATOLL_PACKAGES__INDEX_URL=index.url) as server:
            with server.client() as http:
                body = {"dependencies": wanted("greet"), "timeout": 600}
                session = answer(http.post(f"{V1}/sessions?wait=0", json=body), 201)["id"]
                assert held.asked.wait(30)
            server.stop(signal.SIGKILL)
            held.go.set()
            with server.start().client() as http:
                api = Api(http)
                assert api.run(session, "import greet; print(greet.version)")["stdout"] == "1.0\n"
                assert api.get(session)["status"] == "running"
            assert list((tmp_path / "node" / "installs").iterdir()) == []


# Failures


def test_a_package_missing_from_the_index_fails_the_session(api: Api) -> None:
    failed = refused(api, 422, "dependency_failed", dependencies=wanted("needs-nothing-there"))
    assert "not-on-the-index" in failed["detail"]
    session = api.get(failed["session_id"])
    assert session["status"] == "failed"
    assert session["dependencies"]["status"] == "failed"
    assert "not-on-the-index" in log_of(api, failed["session_id"])


def test_packages_can_be_optional(api: Api) -> None:
    session = api.create(dependencies=wanted("not-on-the-index"), fail_on_dependency_error=False)
    assert session["status"] == "running"
    assert session["dependencies"]["status"] == "failed"
    assert [warning["code"] for warning in session["warnings"]] == ["dependency_failed"]
    assert api.run(session["id"], "print(1)")["stdout"] == "1\n"
    api.end(session["id"])


def test_a_source_package_is_not_built_unless_settings_allow_it(api: Api) -> None:
    failed = refused(api, 422, "dependency_failed", dependencies=wanted("only-source"))
    assert "source" in failed["detail"]


def test_a_version_other_than_that_of_the_template_is_a_conflict(api: Api) -> None:
    versions = api.create()["id"]
    code = "import importlib.metadata as m; print(m.version('pip'))"
    has = api.run(versions, code)["stdout"].strip()
    api.end(versions)
    conflict = refused(api, 409, "version_conflict", dependencies=wanted("pip>9000"))
    assert conflict["conflicts"] == [{"name": "pip", "requested": ">9000", "template_has": has}]
    session = api.create(dependencies=wanted("pip>9000"), allow_version_conflicts=True)
    assert session["dependencies"]["installed"] == ["pip==9001.0"]
    assert api.run(session["id"], "import pip; print(pip.__file__)")["exit_code"] == 0
    api.end(session["id"])
    # What the template has is not installed again.
    session = api.create(dependencies=wanted("pip>1"))
    assert session["dependencies"]["installed"] == [f"pip=={has}"]
    api.end(session["id"])


def test_dependencies_of_a_package_are_checked_against_the_template_too(api: Api) -> None:
    failed = refused(api, 422, "dependency_failed", dependencies=wanted("needs-other-pip"))
    assert "pip 9001.0 (the template has" in failed["detail"]
    session = api.create(dependencies=wanted("needs-other-pip"), allow_version_conflicts=True)
    assert "pip==9001.0" in session["dependencies"]["installed"]
    api.end(session["id"])


@pytest.mark.parametrize(
    "dependency",
    [
        {"name": "../greet"},
        {"name": "/etc/passwd"},
        {"name": "greet @ http://127.0.0.1/x.whl"},
        {"name": "git+https://host/x"},
        {"name": "--index-url=http://host"},
        {"name": "-r", "version": "/etc/passwd"},
        {"name": "greet", "version": "==1.0 --index-url http://host"},
        {"name": "greet", "version": "==1.0\n--index-url=http://host"},
        {"name": "greet", "version": "@ file:///etc/passwd"},
        {"name": "greet", "version": "==1.0; python_version > '3'"},
        {"name": "greet", "version": "1.0"},
        {"name": "greet", "version": "===1.0"},
        {"name": "greet", "version": "[extra]"},
        {"name": "greet[--x]"},
        {"name": ""},
    ],
    ids=str,
)
def test_only_names_and_versions_are_accepted(
    api: Api, index: Index, dependency: dict[str, str]
) -> None:
    asked = len(index.asked)
    refused(api, 422, "invalid_request", dependencies=[dependency])
    assert len(index.asked) == asked


def test_a_package_is_listed_once_and_at_most_fifty_are_allowed(api: Api) -> None:
    twice = [{"name": "greet"}, {"name": "Greet", "version": "==1.0"}]
    refused(api, 422, "invalid_request", dependencies=twice)
    refused(api, 422, "invalid_request", dependencies=wanted(*(f"p{i}" for i in range(51))))


# Later on


@pytest.mark.slow
def test_packages_can_be_added_to_a_running_session(api: Api) -> None:
    session = api.create()["id"]
    context = answer(api.http.post(f"{V1}/sessions/{session}/contexts", json={}), 201)["id"]
    assert api.run(session, "kept = 1", context_id=context)["exit_code"] == 0
    response = answer(add(api, session, "lower<2"))
    assert response["installed"] == ["lower==1.0"]
    code = "import lower; print(lower.version)"
    assert api.run(session, code)["stdout"] == "1.0\n"
    assert api.run(session, f"{code}; print(kept)", context_id=context)["stdout"] == "1.0\n1\n"
    response = answer(add(api, session, "greet==1.2"))
    assert response["requested"] == ["greet==1.2", "lower<2"]
    assert api.run(session, "import greet, lower; print(lower.version)")["stdout"] == "1.0\n"
    assert api.run(session, "import greet", context_id=context)["exit_code"] == 0
    assert api.run(session, command=["hello-greet"])["stdout"] == "greet 1.2\n"
    assert api.get(session)["dependencies"] == response
    api.end(session)


def test_a_failed_addition_keeps_the_installed_packages(api: Api) -> None:
    session = api.create(dependencies=wanted("lower==1.0"))["id"]
    problem(add(api, session, "not-on-the-index"), 422, "dependency_failed")
    problem(add(api, session, "pip>9000"), 409, "version_conflict")
    response = answer(api.http.get(f"{V1}/sessions/{session}/dependencies"))
    assert (response["status"], response["installed"]) == ("installed", ["lower==1.0"])
    assert api.run(session, "import lower; print(lower.version)")["stdout"] == "1.0\n"
    api.end(session)
    problem(add(api, session, "lower"), 409, "session_ended")


def test_only_one_addition_runs_at_a_time(api: Api, index: Index) -> None:
    index.add("later", "1.0")
    held = index.hold("/files/later-1.0-py3-none-any.whl")
    session = api.create()["id"]
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(add, api, session, "later")
        assert held.asked.wait(30)
        response = answer(api.http.get(f"{V1}/sessions/{session}/dependencies"))
        assert (response["status"], response["requested"]) == ("installing", ["later"])
        problem(add(api, session, "lower"), 409, "install_in_progress")
        held.go.set()
        assert answer(first.result(60))["installed"] == ["later==1.0"]
    api.end(session)


def test_packages_survive_a_replaced_instance(api: Api) -> None:
    session = api.create()["id"]
    assert answer(add(api, session, "lower==1.0"))["status"] == "installed"
    api.run(session, "import os; os.kill(os.getppid(), 9)")
    assert api.run(session, "import lower; print(lower.version)")["stdout"] == "1.0\n"
    api.end(session)


@pytest.mark.slow
def test_an_index_that_answers_in_html_works(bubblewrap: str, tmp_path: Path) -> None:
    with Index(html=True) as index:
        index.add("greet", "1.2", requires=["lower"]).add("lower", "2.0")
        with (
            Server(tmp_path, ATOLL_PACKAGES__INDEX_URL=index.url) as server,
            server.client() as http,
        ):
            api = Api(http)
            session = api.create(dependencies=wanted("greet"))
            assert session["dependencies"]["installed"] == ["greet==1.2", "lower==2.0"]
            api.end(session["id"])


# The SDK and the command line


def test_the_sdk_creates_sessions_with_packages_and_adds_some(server: Server, api: Api) -> None:
    with Atoll(server.url, api_key=server.key) as atoll:
        wanted_here: list[str | dict[str, str]] = [
            "greet >= 1.1",
            {"name": "fancy", "version": "==1.0"},
        ]
        with atoll.session(dependencies=wanted_here) as session:
            assert session.info.dependencies is not None
            assert session.info.dependencies.installed == ("fancy==1.0", "greet==1.2", "lower==2.0")
            assert session.install("lower<2").installed[-1] == "lower==1.0"
            assert session.dependencies().requested == ("fancy==1.0", "greet>=1.1", "lower<2")
            assert "Installed: " in session.install_log()
            assert session.run("import lower; print(lower.version)").stdout == "1.0\n"
            with pytest.raises(InvalidRequest) as failed:
                session.install("not-on-the-index")
            assert failed.value.code == "dependency_failed"
        with pytest.raises(InvalidRequest):
            atoll.sessions.create(dependencies=["-r requirements.txt"])


def test_the_command_line_creates_sessions_with_packages_and_adds_some(
    server: Server, api: Api
) -> None:
    def run(*arguments: str) -> str:
        done = server.atoll("session", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    session = run("create", "--dependency", "lower==1.0", "-d", "fancy").strip()
    assert api.get(session)["dependencies"]["installed"] == ["fancy==1.0", "lower==1.0"]
    assert run("install", session, "greet").splitlines() == [
        "fancy==1.0",
        "greet==1.2",
        "lower==1.0",
    ]
    api.end(session)
