"""Templates from images, over the REST API: a real engine, a real registry."""

from __future__ import annotations

import hashlib
import io
import sqlite3
import tarfile
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from atoll import Atoll
from tests.e2e.api import V1, Api, answer, eventually, problem
from tests.harness import Server
from tests.servers.images import PYTHON, SHELL
from tests.servers.registry import PASSWORD, USER

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers.docker import Dockerd
    from tests.servers.registry import Registry

ANSWERS = f"FROM {PYTHON}\nCOPY answer.py /opt/answer.py\nRUN echo put-together\n"


@pytest.fixture(scope="module")
def on_docker(dockerd: Dockerd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    env = {
        "ATOLL_DRIVER": "docker",
        "ATOLL_DOCKER__URL": dockerd.url,
        "ATOLL_DOCKER__IMAGE": PYTHON,
        "ATOLL_TEMPLATE__BUILD_BACKOFF": "0.1",
        "ATOLL_TEMPLATE__BUILD_RETRIES": "100",
        "ATOLL_POOL__SIZE": "0",
    }
    with Server(tmp_path_factory.mktemp("server"), "--stop-sessions", **env) as running:
        yield running


@pytest.fixture(scope="module")
def docker_api(on_docker: Server) -> Iterator[Api]:
    with on_docker.client() as http:
        yield Api(http)


@pytest.fixture
def private(dockerd: Dockerd, registry: Registry) -> str:
    """An image with Python that is in the registry alone."""
    dockerd.ask("POST", f"/images/{PYTHON}/tag", params={"repo": "only-there", "tag": "1"})
    return registry.put(dockerd, "only-there:1", "team/python:1")


def create(api: Api, status: str = "ready", **fields: Any) -> dict[str, Any]:
    made = answer(api.http.post(f"{V1}/templates", json={"name": "x", **fields}), 201)
    return settled(api, made["id"], status)


def settled(api: Api, template_id: str, status: str = "ready") -> dict[str, Any]:
    def has_ended() -> bool:
        return get(api, template_id)["status"] in ("ready", "failed")

    eventually(has_ended, 60)
    found = get(api, template_id)
    assert found["status"] == status, found
    return found


def get(api: Api, template_id: str) -> dict[str, Any]:
    return answer(api.http.get(f"{V1}/templates/{template_id}"))


def log_of(api: Api, template_id: str) -> str:
    return api.http.get(f"{V1}/templates/{template_id}/log").text


def printed(api: Api, template_id: str, code: str) -> str:
    session = api.create(template_id=template_id)
    try:
        return str(api.run(session["id"], code)["stdout"])
    finally:
        api.end(session["id"])


def context(files: dict[str, bytes]) -> tuple[str, bytes]:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return hashlib.sha256(made.getvalue()).hexdigest(), made.getvalue()


def put(api: Api, files: dict[str, bytes]) -> str:
    digest, data = context(files)
    response = answer(api.http.put(f"{V1}/build-contexts/{digest}", content=data), 201)
    assert response == {"digest": digest, "size": len(data)}
    return digest


def test_an_available_image_makes_a_template_at_once(docker_api: Api) -> None:
    made = answer(docker_api.http.post(f"{V1}/templates", json={"name": "x", "image": PYTHON}), 201)

    assert made["status"] == "ready"
    assert made["command"] == ["/bin/sh", "-c", "bash"] or made["command"] == ["bash"]
    assert made["entrypoint"] == []
    assert printed(docker_api, made["id"], "print(1 + 1)") == "2\n"


def test_an_image_is_pulled_with_credentials_that_are_never_returned(
    docker_api: Api, on_docker: Server, registry: Registry, private: str
) -> None:
    made = create(docker_api, image=private, registry={"username": USER, "password": PASSWORD})

    assert made["registry"] == {"server": registry.server}
    assert made["image_digest"].startswith("sha256:")
    log = log_of(docker_api, made["id"])
    assert "Pulling from team/python" in log
    assert printed(docker_api, made["id"], "print(6 * 7)") == "42\n"
    events = docker_api.http.get(f"{V1}/events").text
    everything = on_docker.stderr() + log + events + str(made)
    assert PASSWORD not in everything
    with closing(sqlite3.connect(on_docker.data_dir / "atoll.db")) as database:
        dump = "\n".join(database.iterdump())
    assert made["id"] in dump
    assert PASSWORD not in dump
    assert USER not in dump


def test_credentials_stay_with_their_server(docker_api: Api, private: str) -> None:
    made = create(docker_api, image=private, registry={"username": USER, "password": PASSWORD})
    path = f"{V1}/templates/{made['id']}"
    kept = {"name": "y", "image": private, "registry": made["registry"]}

    assert answer(docker_api.http.put(path, json=kept))["registry"] == made["registry"]
    for server in ("elsewhere.example.com", "docker.io"):
        other = kept | {"image": f"{server}/team/python:1", "registry": {"server": server}}
        problem(docker_api.http.put(path, json=other), 422, "invalid_request")
    # Nor are they given to the server of another image.
    other = kept | {"image": "elsewhere.example.com/team/python:1"}
    error = problem(docker_api.http.put(path, json=other), 422, "invalid_request")
    assert error["field"] == "registry.server"
    rebuilt = answer(docker_api.http.post(f"{path}/build"), 202)
    assert settled(docker_api, made["id"])["version"] == rebuilt["version"]
    assert "Pulling from" in log_of(docker_api, made["id"])


def test_a_rebuilt_version_stays_when_another_field_changes(
    docker_api: Api, private: str, registry: Registry, dockerd: Dockerd
) -> None:
    given: dict[str, Any] = {
        "name": "x",
        "image": private,
        "registry": {"username": USER, "password": PASSWORD},
    }
    made = create(docker_api, **given)
    path = f"{V1}/templates/{made['id']}"
    # The tag moves, and the earlier image is still on the node.
    dockerd.ask("POST", f"/images/{SHELL}/tag", params={"repo": "moved", "tag": "1"})
    registry.put(dockerd, "moved:1", "team/python:1")
    answer(docker_api.http.post(f"{path}/build"), 202)
    rebuilt = settled(docker_api, made["id"])
    assert rebuilt["image_digest"] not in (None, made["image_digest"])

    kept = given | {"name": "y", "registry": made["registry"]}
    changed = answer(docker_api.http.put(path, json=kept))
    assert (changed["status"], changed["name"]) == ("ready", "y")
    assert changed["image_digest"] == rebuilt["image_digest"]


def test_wrong_credentials_fail_the_build_and_are_not_shown(docker_api: Api, private: str) -> None:
    made = create(
        docker_api,
        "failed",
        image=private,
        registry={"username": USER, "password": "wrong-password-12"},
    )

    assert made["attempts"] == 1
    assert "No permission to pull" in made["message"]
    assert "wrong-password-12" not in log_of(docker_api, made["id"]) + made["message"]


@pytest.mark.parametrize(
    "registry",
    [
        {"username": "a"},
        {"password": "secret-part"},
        {"username": "a", "password": "secret-part", "identity_token": "secret-part"},
        {"username": "a", "password": ""},
        {"username": "a", "password": "secret-part", "server": "http://secret-part"},
        {},
    ],
    ids=str,
)
def test_incomplete_credentials_are_refused_without_repeating_them(
    docker_api: Api, registry: dict[str, str]
) -> None:
    body = {"name": "x", "image": PYTHON, "registry": registry}
    response = docker_api.http.post(f"{V1}/templates", json=body)
    problem(response, 422, "invalid_request")
    assert "secret-part" not in response.text


def test_an_unavailable_registry_is_retried(
    docker_api: Api, registry: Registry, private: str
) -> None:
    registry.stop()
    body = {
        "name": "x",
        "image": private,
        "registry": {"username": USER, "password": PASSWORD},
    }
    made = answer(docker_api.http.post(f"{V1}/templates", json=body), 201)
    eventually(lambda: "Next attempt in" in log_of(docker_api, made["id"]))
    registry.start()

    assert settled(docker_api, made["id"])["attempts"] > 1


def test_a_dockerfile_is_built_with_its_uploaded_context(docker_api: Api) -> None:
    digest = put(docker_api, {"answer.py": b"print('from the context')"})
    made = create(docker_api, dockerfile=ANSWERS, build_context=digest)

    assert (made["dockerfile"], made["build_context"]) == (ANSWERS, digest)
    assert "put-together" in log_of(docker_api, made["id"])
    code = "exec(open('/opt/answer.py').read())"
    assert printed(docker_api, made["id"], code) == "from the context\n"
    # The same context exists already.
    again = answer(
        docker_api.http.post(
            f"{V1}/templates",
            json={"name": "y", "dockerfile": ANSWERS, "build_context": digest},
        ),
        201,
    )
    assert again["status"] == "ready"


def test_a_failed_build_reports_the_reason(docker_api: Api) -> None:
    made = create(docker_api, "failed", dockerfile=f"FROM {SHELL}\nRUN echo oh no; exit 3\n")

    assert "oh no" in made["message"]
    assert made["attempts"] == 1


def test_a_context_must_match_its_digest(docker_api: Api) -> None:
    digest, data = context({"a": b"1"})
    place = f"{V1}/build-contexts/{digest}"
    problem(docker_api.http.get(place), 404, "build_context_not_found")
    problem(docker_api.http.put(place, content=data + b"x"), 422, "digest_mismatch")
    problem(docker_api.http.get(place), 404, "build_context_not_found")
    problem(docker_api.http.put(f"{V1}/build-contexts/x", content=data), 422, "invalid_request")
    body = {"name": "x", "dockerfile": f"FROM {SHELL}\n", "build_context": digest}
    problem(docker_api.http.post(f"{V1}/templates", json=body), 422, "build_context_not_found")


def test_a_node_lists_its_cached_images(docker_api: Api) -> None:
    made = create(docker_api, image=PYTHON)
    edition = f"{made['id']}@{made['version']}"

    def is_cached() -> bool:
        nodes = answer(docker_api.http.get(f"{V1}/nodes"))["items"]
        return edition in nodes[0]["cached_templates"]

    eventually(is_cached)
    node = answer(docker_api.http.get(f"{V1}/nodes"))["items"][0]
    assert {"image", "runtime.runc"} <= set(node["features"])


def test_a_node_without_docker_reports_unsupported_fields(api: Api) -> None:
    for name, value in (
        ("dockerfile", "FROM scratch"),
        ("runtime", "runsc"),
        ("registry", {"server": "r.example.com", "username": "a", "password": "b"}),
    ):
        body = {"name": "x", name: value}
        error = problem(api.http.post(f"{V1}/templates", json=body), 422, f"{name}_unsupported")
        assert error["field"] == name


def test_the_sdk_keeps_credentials_with_their_registry(on_docker: Server, private: str) -> None:
    given = {"username": USER, "password": PASSWORD}
    with Atoll(on_docker.url, api_key=on_docker.key) as atoll:
        made = atoll.templates.create("x", image=private, registry=given)
        made = atoll.templates.wait_ready(made.id, timeout=60)
        assert made.registry is not None
        assert atoll.templates.update(made.id, image=private, name="y").registry == made.registry
        moved = atoll.templates.update(made.id, image=PYTHON)
        assert (moved.image, moved.registry) == (PYTHON, None)


def test_the_sdk_and_the_command_line_build_from_a_directory(
    on_docker: Server, tmp_path: Path
) -> None:
    (tmp_path / "answer.py").write_text("print('from a directory')")
    with Atoll(on_docker.url, api_key=on_docker.key) as atoll:
        made = atoll.templates.create("x", dockerfile=ANSWERS, context=tmp_path)
        made = atoll.templates.wait_ready(made.id, timeout=60)
        assert made.command is not None
        changed = atoll.templates.update(made.id, name="y")
        assert (changed.dockerfile, changed.build_context) == (ANSWERS, made.build_context)
        assert changed.status == "ready"
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(ANSWERS)
    ran = on_docker.atoll(
        "template", "create", "z", "--dockerfile", str(dockerfile), "--context", str(tmp_path),
        "--runtime", "runc", "--registry-server", "r.example.com", "--registry-user", "robin",
        "--json", input="from-stdin-77\n",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert '"server": "r.example.com"' in ran.stdout
    assert "from-stdin-77" not in ran.stdout + ran.stderr
