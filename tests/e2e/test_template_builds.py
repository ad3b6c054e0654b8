"""Templates with packages: built by the server, versioned, kept by the sessions that have them."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from atoll import Atoll
from atoll.errors import PermanentError
from tests import drivers
from tests.e2e.api import V1, Api, answer, eventually, problem, read_events
from tests.harness import Server
from tests.servers import debian
from tests.servers.index import Index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Make = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.quick

BUILD_UID = 1_666_000_000
as_root = pytest.mark.skipif(
    os.geteuid() != 0 or debian.missing() is not None, reason="needs root, apt and dpkg"
)


@pytest.fixture(scope="module")
def index() -> Iterator[Index]:
    with Index() as running:
        running.add("greet", "1.0").add("greet", "1.2", scripts={"hello-greet": "greet:main"})
        running.add("lower", "1.0").add("lower", "2.0")
        yield running


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> debian.Repository:
    made = debian.Repository(tmp_path_factory.mktemp("mirror"))
    made.add("hello", files={"/usr/bin/hello": "#!/bin/sh\necho hello\n"})
    made.add("hello-again", depends="hello", files={"/opt/again/word": "again"})
    made.add("broken", postinst="echo it does not work; exit 1")
    made.add("hello+", files={"/opt/plus": "plus"})
    return made


@pytest.fixture(scope="module")
def server(
    bubblewrap: str,
    index: Index,
    repository: debian.Repository,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    with Server(
        tmp_path_factory.mktemp("server"),
        ATOLL_PACKAGES__INDEX_URL=index.url,
        ATOLL_PACKAGES__DEBIAN_MIRROR=repository.url,
        ATOLL_PACKAGES__DEBIAN_SUITE="./",
        ATOLL_PACKAGES__DEBIAN_UNSIGNED="true",
        ATOLL_POOL__SIZE="0",
        ATOLL_LOCAL__BUILD_UID=str(BUILD_UID),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def base(server: Server) -> str:
    return str(debian.make_base(server.data_dir / "rootfs" / "base"))


@pytest.fixture
def api(server: Server) -> Iterator[Api]:
    with server.client() as http:
        yield Api(http)


@pytest.fixture
def make(api: Api) -> Iterator[Make]:
    """Makes templates that go with the test, and waits for their builds."""
    made: list[str] = []

    def make(status: str = "ready", **fields: Any) -> dict[str, Any]:
        shown = answer(api.http.post(f"{V1}/templates", json={"name": "Test", **fields}), 201)
        made.append(shown["id"])
        return built(api, shown["id"], status)

    yield make
    for template_id in made:
        api.http.delete(f"{V1}/templates/{template_id}")


def shown(api: Api, template_id: str) -> dict[str, Any]:
    return answer(api.http.get(f"{V1}/templates/{template_id}"))


def built(api: Api, template_id: str, status: str = "ready") -> dict[str, Any]:
    eventually(lambda: shown(api, template_id)["status"] in ("ready", "failed"), 60)
    template = shown(api, template_id)
    assert template["status"] == status, log_of(api, template_id)
    return template


def log_of(api: Api, template_id: str, **params: Any) -> str:
    response = api.http.get(f"{V1}/templates/{template_id}/log", params=params)
    assert response.status_code == 200, response.text
    return response.text


def in_a_session(api: Api, template_id: str, code: str, **fields: Any) -> str:
    session = api.create(template_id=template_id)["id"]
    result = api.run(session, code, **fields)
    api.end(session)
    assert result["status"] == "success", result
    return str(result["stdout"])


def in_a_shell(api: Api, template_id: str, command: str) -> str:
    session = api.create(template_id=template_id)["id"]
    result = api.run(session, command=["/bin/sh", "-c", command])
    api.end(session)
    assert result["status"] == "success", result
    return str(result["stdout"])


# Python packages


def test_a_template_has_its_python_packages_preloaded(api: Api, make: Make) -> None:
    template = make(python_packages=["greet>=1", "lower<2"], preload=["greet"])

    assert template["installed_packages"] == ["greet==1.2", "lower==1.0"]
    assert template["attempts"] == 1
    code = "import sys; print('greet' in sys.modules)\nimport greet, lower\n"
    code += "print(greet.version, lower.version)"
    assert in_a_session(api, template["id"], code) == "True\n1.2 1.0\n"
    assert in_a_shell(api, template["id"], "hello-greet") == "greet 1.2\n"
    assert "greet==1.2" in log_of(api, template["id"])


def test_packages_given_as_pre_installed_packages_are_installed_too(api: Api, make: Make) -> None:
    template = make(pre_installed_packages=["greet==1.0"])
    assert template["python_packages"] == template["pre_installed_packages"] == ["greet==1.0"]
    assert in_a_session(api, template["id"], "import greet; print(greet.version)") == "1.0\n"
    changed = {"name": "Changed", **template, "python_packages": ["greet==1.2"]}
    fields = ("name", "python_packages", "pre_installed_packages")
    body = {name: changed[name] for name in fields}
    again = answer(api.http.put(f"{V1}/templates/{template['id']}", json=body))
    assert again["python_packages"] == ["greet==1.2"]


def test_packages_of_a_session_override_those_of_its_template(api: Api, make: Make) -> None:
    template = make(python_packages=["greet==1.0"])
    other = {"name": "greet", "version": "==1.2"}
    body = {"template_id": template["id"], "dependencies": [other]}

    problem(api.http.post(f"{V1}/sessions", json=body), 409, "version_conflict")
    session = api.create(**body, allow_version_conflicts=True)["id"]

    assert api.run(session, "import greet; print(greet.version)")["stdout"] == "1.2\n"
    api.end(session)


def test_a_package_that_does_not_exist_fails_the_build_at_once(api: Api, make: Make) -> None:
    template = make("failed", python_packages=["not-on-the-index"])

    assert template["attempts"] == 1
    assert "not-on-the-index" in template["message"]
    assert "not-on-the-index" in log_of(api, template["id"])
    error = problem(
        api.http.post(f"{V1}/sessions", json={"template_id": template["id"]}),
        409,
        "template_not_ready",
    )
    assert error["template_status"] == "failed"
    assert template["message"] in error["detail"]


@pytest.mark.parametrize(
    "requirement",
    ["--index-url=x", "-e .", "./here", "a @ file:///x", "a; python_version>'3'", "a b", ""],
)
def test_options_paths_and_addresses_are_refused_as_requirements(
    api: Api, requirement: str
) -> None:
    body = {"name": "x", "python_packages": [requirement]}
    problem(api.http.post(f"{V1}/templates", json=body), 422, "invalid_request")


def test_a_dockerfile_is_refused(api: Api) -> None:
    body = {"name": "x", "dockerfile": "FROM scratch"}
    problem(api.http.post(f"{V1}/templates", json=body), 422, "dockerfile_unsupported")


# Versions


@pytest.mark.slow
def test_a_session_keeps_its_template_version(
    server: Server, index: Index, make: Make, api: Api
) -> None:
    template_id = make(python_packages=["greet==1.0"])["id"]
    session = api.create(template_id=template_id)
    code = "import greet, os; print(greet.version, os.getppid())"
    assert session["template_version"] == 1
    assert api.run(session["id"], code)["stdout"].startswith("1.0 ")

    body = {"name": "Newer", "python_packages": ["greet==1.2"]}
    replaced = answer(api.http.put(f"{V1}/templates/{template_id}", json=body))
    assert replaced["version"] == 2
    built(api, template_id)
    newer = api.create(template_id=template_id)
    assert newer["template_version"] == 2
    assert api.run(newer["id"], code)["stdout"].startswith("1.2 ")
    for _ in range(2):
        _kill_instances(server)
        assert api.run(session["id"], code)["stdout"].startswith("1.0 ")
        server.stop(signal.SIGKILL)
        server.start()
        api.http.base_url = server.url
        assert api.run(session["id"], code)["stdout"].startswith("1.0 ")
    assert api.get(session["id"])["template_version"] == 1

    numbers = answer(api.http.get(f"{V1}/templates/{template_id}/versions"))["items"]
    assert [item["version"] for item in numbers] == [2, 1]
    first = answer(api.http.get(f"{V1}/templates/{template_id}/versions/1"))
    assert (first["name"], first["installed_packages"]) == ("Test", ["greet==1.0"])
    for one in (session, newer):
        api.end(one["id"])


def _kill_instances(server: Server) -> None:
    for name in os.listdir(server.data_dir / "node" / "instances"):
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(drivers.handle(server.data_dir, name)["child"], signal.SIGKILL)


def test_versions_are_listed_page_by_page(api: Api, make: Make) -> None:
    template_id = make(id="paged")["id"]
    for n in range(4):
        answer(api.http.put(f"{V1}/templates/{template_id}", json={"name": str(n)}))
    found: list[int] = []
    params: dict[str, Any] = {"limit": 2}
    while True:
        page = answer(api.http.get(f"{V1}/templates/{template_id}/versions", params=params))
        found += [item["version"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]

    assert found == [5, 4, 3, 2, 1]
    path = f"{V1}/templates/{template_id}/versions"
    problem(api.http.get(path, params={"cursor": "x"}), 400, "bad_cursor")
    problem(api.http.get(f"{path}/9"), 404, "template_not_found")


def test_sessions_start_from_the_latest_ready_version(api: Api, make: Make) -> None:
    template_id = make(python_packages=["greet==1.0"])["id"]
    body = {"name": "Broken", "python_packages": ["not-on-the-index"]}
    answer(api.http.put(f"{V1}/templates/{template_id}", json=body))
    built(api, template_id, "failed")

    session = api.create(template_id=template_id)

    assert session["template_version"] == 1
    api.end(session["id"])


def test_ready_instances_have_the_newest_ready_version(api: Api, make: Make) -> None:
    template_id = make(python_packages=["greet==1.0"], preload=["greet"], pool_size=1)["id"]
    eventually(lambda: api.pool().get(template_id) == 1, 30)
    body = {"name": "x", "pool_size": 1}
    path = f"{V1}/templates/{template_id}"

    answer(api.http.put(path, json={**body, "python_packages": ["not-on-the-index"]}))
    built(api, template_id, "failed")
    assert api.pool().get(template_id) == 1
    answer(api.http.put(path, json={**body, "python_packages": ["greet==1.2"]}))
    built(api, template_id)
    eventually(lambda: api.pool().get(template_id) == 1, 30)

    session = api.create(template_id=template_id)
    assert session["template_version"] == 3
    assert api.run(session["id"], "import greet; print(greet.version)")["stdout"] == "1.2\n"
    api.end(session["id"])


def test_rebuilding_creates_a_version_with_newer_packages(
    api: Api, make: Make, index: Index
) -> None:
    index.add("moving", "1.0")
    template = make(python_packages=["moving"])
    index.add("moving", "2.0")

    again = answer(api.http.post(f"{V1}/templates/{template['id']}/build"), 202)

    assert (again["version"], again["status"]) == (2, "pending")
    assert built(api, template["id"])["installed_packages"] == ["moving==2.0"]
    plain = make(name="No packages")["id"]
    problem(api.http.post(f"{V1}/templates/{plain}/build"), 409, "template_not_built")


def test_a_build_can_be_followed(api: Api, make: Make) -> None:
    body = {"name": "x", "python_packages": ["greet==1.0", "lower==2.0"]}
    template = answer(api.http.post(f"{V1}/templates", json=body), 201)
    assert template["status"] == "pending"

    path = f"{V1}/templates/{template['id']}/log"
    with api.http.stream("GET", path, params={"follow": True}) as response:
        events = [(name, content) for _, name, content in read_events(response)]

    assert events[-1][0] == "status"
    assert events[-1][1]["status"] == "ready"
    log = "".join(content["text"] for name, content in events if name == "log")
    assert log.endswith("Ready.\n")
    assert log_of(api, template["id"]) == log
    api.http.delete(f"{V1}/templates/{template['id']}")
    problem(api.http.get(path), 404, "template_not_found")


# Command line and SDK


@pytest.mark.slow
def test_the_command_line_builds_follows_and_lists_templates(server: Server, api: Api) -> None:
    made = server.atoll("template", "build", "by-cli", "--python-package", "greet==1.0")
    assert (made.returncode, made.stdout) == (0, "by-cli version 1\n"), made.stderr
    assert made.stderr.endswith("Ready.\n")

    again = server.atoll("template", "build", "by-cli", "--json")
    assert (again.returncode, json.loads(again.stdout)["version"]) == (0, 2)

    slip = server.atoll("template", "build", "by-cil")
    assert slip.returncode == 1
    assert "template_not_found" in slip.stderr
    failed = server.atoll("template", "build", "by-cli", "--python-package", "not-on-the-index")
    assert failed.returncode == 1
    assert "build_failed" in failed.stderr

    listed = server.atoll("template", "versions", "by-cli").stdout.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [
        ["3", "failed"], ["2", "ready"], ["1", "ready"],
    ]  # fmt: skip
    assert "greet==1.0" in server.atoll("template", "log", "by-cli", "--version", "1").stdout
    api.http.delete(f"{V1}/templates/by-cli")


def test_the_sdk_waits_for_a_build(server: Server) -> None:
    with Atoll(server.url, api_key=server.key) as client:
        client.templates.create("SDK", template_id="by-sdk", python_packages=["greet==1.0"])
        ready = client.templates.wait_ready("by-sdk", timeout=60)
        assert (ready.status, ready.installed_packages) == ("ready", ("greet==1.0",))
        changed = client.templates.update("by-sdk", env={"A": "1"})
        assert (changed.version, changed.status) == (2, "ready")
        assert changed.python_packages == ("greet==1.0",)

        client.templates.update("by-sdk", python_packages=["not-on-the-index"])
        with pytest.raises(PermanentError) as caught:
            client.templates.wait_ready("by-sdk", timeout=60)
        assert caught.value.code == "build_failed"
        assert [each.version for each in client.templates.versions("by-sdk")] == [3, 2, 1]
        assert client.templates.version("by-sdk", 2).env == {"A": "1"}
        assert "not-on-the-index" in client.templates.log("by-sdk")
        client.templates.delete("by-sdk")


# Debian packages


@as_root
def test_debian_packages_are_installed_on_a_base(api: Api, make: Make, base: str) -> None:
    template = make(base_image=base, debian_packages=["hello-again"])

    assert in_a_shell(api, template["id"], "hello; cat /opt/again/word") == "hello\nagain"
    assert "Setting up hello" in log_of(api, template["id"])
    assert not (Path(base) / "usr/bin/hello").exists()
    assert in_a_session(api, template["id"], "print(open('/opt/again/word').read())") == "again\n"


@as_root
def test_equal_packages_are_built_once_and_another_template_can_be_a_base(
    api: Api, make: Make, base: str, server: Server
) -> None:
    first = make(base_image=base, debian_packages=["hello"])
    layers = set(os.listdir(server.data_dir / "node" / "layers"))
    second = make(base_image=base, debian_packages=["hello"], env={"A": "1"})
    assert "already has the layers" in log_of(api, second["id"])
    assert set(os.listdir(server.data_dir / "node" / "layers")) <= layers

    upper = make(
        base_image=f"template:{first['id']}",
        debian_packages=["hello-again"],
        python_packages=["greet==1.0"],
        preload=["greet"],
    )

    assert in_a_shell(api, upper["id"], "hello; cat /opt/again/word") == "hello\nagain"
    assert in_a_session(api, upper["id"], "import greet; print(greet.version)") == "1.0\n"
    assert "1 newly installed" in log_of(api, upper["id"])


@as_root
@pytest.mark.parametrize(
    ("packages", "words"),
    [
        (["nosuch"], "nosuch"),
        (["hello=9"], "9"),
        (["broken"], "broken"),
        pytest.param(["hell."], "hell.", marks=pytest.mark.quick),
        (["hello", "hello-again+"], "hello-again+"),
    ],
    ids=["no package", "no version", "postinst fails", "pattern", "name with a sign"],
)
def test_a_package_that_cannot_be_installed_fails_at_once_and_leaves_nothing(
    api: Api, make: Make, base: str, server: Server, packages: list[str], words: str
) -> None:
    before = set(os.listdir(server.data_dir / "node" / "layers"))

    template = make("failed", base_image=base, debian_packages=packages)

    assert template["attempts"] == 1
    assert words in template["message"]
    assert set(os.listdir(server.data_dir / "node" / "layers")) <= before


@as_root
def test_a_package_name_that_ends_with_a_plus_is_not_an_option_of_apt(
    api: Api, make: Make, base: str
) -> None:
    template = make(base_image=base, debian_packages=["hello+"])

    assert in_a_shell(api, template["id"], "cat /opt/plus; test ! -e /usr/bin/hello") == "plus"


@pytest.mark.slow
@as_root
def test_a_build_continues_after_the_server_was_killed(
    api: Api, make: Make, base: str, server: Server, repository: debian.Repository
) -> None:
    repository.add("waits", postinst=WAITS)
    body = {"name": "x", "id": "waits", "base_image": base, "debian_packages": ["waits"]}
    answer(api.http.post(f"{V1}/templates", json=body), 201)
    eventually(lambda: "it waits" in log_of(api, "waits"), 30)
    assert shown(api, "waits")["status"] == "building"
    (left,) = (n for n in os.listdir(server.data_dir / "node" / "layers") if n.startswith("."))

    server.stop(signal.SIGKILL)
    eventually(lambda: not _builders())
    (repository.place / "go").touch()
    server.start()
    api.http.base_url = server.url

    assert built(api, "waits")["attempts"] == 2
    assert "it waits" in log_of(api, "waits")
    assert left not in os.listdir(server.data_dir / "node" / "layers")
    api.http.delete(f"{V1}/templates/waits")


WAITS = """python3 -u - <<'END'
import time, urllib.request, urllib.error
print("it waits")
while True:
    try:
        urllib.request.urlopen("http://127.0.0.1:3142/0/go")
        break
    except urllib.error.HTTPError:
        time.sleep(0.05)
END"""


def _builders() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            uid = int((entry / "status").read_text().partition("Uid:")[2].split()[0])
        except (OSError, IndexError):
            continue
        if BUILD_UID <= uid < BUILD_UID + 65_536:
            found.append(entry.name)
    return found


@pytest.mark.parametrize(
    "package", ["-y", "--option", "a b", "/etc/passwd", "../x", "hello;id", "Hello", "h=", "a\n-y",
                "hello-", "hello=1.0-", "hello=1.0+", "h", "hello*", "?hello", "~nhello", "hello^",
                "hello/sid", "hello:all"]
)  # fmt: skip
def test_options_and_paths_are_refused_as_debian_packages(api: Api, package: str) -> None:
    body = {"name": "x", "base_image": "/", "debian_packages": [package]}
    problem(api.http.post(f"{V1}/templates", json=body), 422, "invalid_request")


@as_root
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"base_image": "/usr"}, "place_not_allowed"),
        ({"base_image": "relative"}, "place_not_allowed"),
        ({"base_image": ""}, "invalid_request"),
        ({"base_image": "template:nobody"}, "invalid_request"),
        ({"image": "/"}, "invalid_request"),
    ],
    ids=str,
)
def test_a_base_must_be_allowed_by_the_settings(
    api: Api, fields: dict[str, str], code: str
) -> None:
    body = {"name": "x", "debian_packages": ["hello"], **fields}
    problem(api.http.post(f"{V1}/templates", json=body), 422, code)
