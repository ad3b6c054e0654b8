"""Templates: what sessions start from."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Make = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.quick


@pytest.fixture
def make(api: Api) -> Iterator[Make]:
    """Makes templates that go with the test."""
    made: list[str] = []

    def make(**fields: Any) -> dict[str, Any]:
        shown = answer(api.http.post(f"{V1}/templates", json={"name": "Test", **fields}), 201)
        made.append(shown["id"])
        return shown

    yield make
    for template_id in made:
        api.http.delete(f"{V1}/templates/{template_id}")


def in_a_session(api: Api, template_id: str, code: str) -> str:
    session = api.create(template_id=template_id)["id"]
    result = api.run(session, code)
    api.end(session)
    assert result["status"] == "success", result
    return str(result["stdout"])


def test_a_template_is_created_read_and_removed(api: Api, make: Make) -> None:
    made = make(
        id="mine.v1",
        name="Mine",
        env={"A": "1"},
        preload=["json"],
        default_resources={"memory": "256Mi"},
        pool_size=0,
    )

    assert made["id"] == "mine.v1"
    assert made["version"] == 1
    assert made["default_resources"] == {
        "cpu": "1", "memory": "256Mi", "disk": "1Gi", "max_processes": 128,
    }  # fmt: skip
    assert answer(api.http.get(f"{V1}/templates/mine.v1")) == made
    assert api.http.delete(f"{V1}/templates/mine.v1").status_code == 204
    problem(api.http.get(f"{V1}/templates/mine.v1"), 404, "template_not_found")
    problem(api.http.delete(f"{V1}/templates/mine.v1"), 404, "template_not_found")
    body = {"template_id": "mine.v1"}
    problem(api.http.post(f"{V1}/sessions", json=body), 404, "template_not_found")


def test_a_template_without_an_id_gets_one(make: Make) -> None:
    assert make()["id"] != make()["id"]


def test_an_id_can_be_used_only_once(api: Api, make: Make) -> None:
    make(id="once")
    response = api.http.post(f"{V1}/templates", json={"id": "once", "name": "Again"})

    assert response.status_code == 409
    assert response.headers["content-type"] == "application/problem+json"


def test_replacing_a_template_sets_every_field(api: Api, make: Make) -> None:
    made = make(id="changing", env={"A": "1"}, preload=["json"])
    replaced = answer(api.http.put(f"{V1}/templates/changing", json={"name": "New"}))

    assert (replaced["name"], replaced["env"], replaced["preload"]) == ("New", {}, [])
    assert replaced["version"] == 2
    assert replaced["created_at"] == made["created_at"]
    assert replaced["updated_at"] > made["updated_at"]
    assert answer(api.http.get(f"{V1}/templates/changing")) == replaced
    problem(api.http.put(f"{V1}/templates/nobody", json={"name": "x"}), 404, "template_not_found")


def test_templates_are_listed_page_by_page(api: Api, make: Make) -> None:
    made = [make()["id"] for _ in range(3)]
    found: list[str] = []
    params: dict[str, Any] = {"limit": 2}
    while True:
        page = answer(api.http.get(f"{V1}/templates", params=params))
        found += [item["id"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]

    assert found[:3] == made[::-1]
    assert "python" in found


def test_the_built_in_template_cannot_be_changed(api: Api) -> None:
    response = api.http.put(f"{V1}/templates/python", json={"name": "Mine now"})
    problem(response, 409, "template_built_in")
    problem(api.http.delete(f"{V1}/templates/python"), 409, "template_built_in")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": ""},
        {"name": "x", "colour": "red"},
        {"name": "x", "id": "a/b"},
        {"name": "x", "id": ""},
        {"name": "x", "pool_size": -1},
        {"name": "x", "pool_size": 51},
        {"name": "x", "pool_max": 51},
        {"name": "x", "pool_max": -1},
        {"name": "x", "pool_size": 2, "pool_max": 1},
        {"name": "x", "preload": ["os; evil"]},
        {"name": "x", "env": {"1A": "x"}},
        {"name": "x", "default_resources": {"memory": "lots"}},
        {"name": "x", "default_resources": {"memory": "128Gi"}},
        {"name": "x", "default_resources": {"cpu": "65"}},
        {"name": "x", "security_context": {"require": ["magic"]}},
        {"name": "x", "security_context": {"privileged": True}},
    ],
    ids=str,
)
def test_an_invalid_body_is_refused(api: Api, body: dict[str, Any]) -> None:
    problem(api.http.post(f"{V1}/templates", json=body), 422, "invalid_request")


@pytest.mark.parametrize(
    "body",
    [
        {"image": "/"},
        {"image": "/etc"},
        {"image": "relative"},
        {"python": "/usr/bin/python3"},
        {"python": "/tmp/../usr/bin/python3"},
    ],
    ids=str,
)
def test_paths_that_the_settings_do_not_allow_are_refused(
    api: Api, server: Server, body: dict[str, str]
) -> None:
    error = problem(
        api.http.post(f"{V1}/templates", json={"name": "x", **body}), 422, "place_not_allowed"
    )
    assert error["field"] == next(iter(body))

    outside = server.data_dir / "rootfs" / ".." / "node"
    response = api.http.post(f"{V1}/templates", json={"name": "x", "image": str(outside)})
    problem(response, 422, "place_not_allowed")


def test_a_link_out_of_an_allowed_directory_is_refused(api: Api, server: Server) -> None:
    link = server.data_dir / "rootfs" / "link"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to("/")
    response = api.http.post(f"{V1}/templates", json={"name": "x", "image": str(link)})
    link.unlink()

    problem(response, 422, "place_not_allowed")


def test_an_image_without_an_interpreter_is_refused(api: Api, server: Server) -> None:
    empty = server.data_dir / "rootfs" / "empty"
    empty.mkdir(parents=True, exist_ok=True)
    response = api.http.post(f"{V1}/templates", json={"name": "x", "image": str(empty)})

    assert problem(response, 422, "invalid_request")["field"] == "image"


def test_replacing_checks_the_new_image(api: Api, server: Server, make: Make) -> None:
    make(id="to-be-broken")
    empty = server.data_dir / "rootfs" / "empty"
    empty.mkdir(parents=True, exist_ok=True)
    body = {"name": "x", "image": str(empty)}
    response = api.http.put(f"{V1}/templates/to-be-broken", json=body)

    assert problem(response, 422, "invalid_request")["field"] == "image"


def test_limits_of_a_template_apply_to_its_sessions(api: Api, make: Make) -> None:
    limits = {"cpu": "0.5", "memory": "200Mi", "disk": "32Mi", "max_processes": 30}
    make(id="limited", default_resources=limits)
    plain = api.create(template_id="limited")
    own = api.create(template_id="limited", memory="100Mi")

    assert plain["resources"] == limits
    assert own["resources"] == {**limits, "memory": "100Mi"}
    for shown in (plain, own):
        api.end(shown["id"])


def test_the_environment_of_a_session_overrides_that_of_its_template(api: Api, make: Make) -> None:
    make(id="with-env", env={"A": "template", "B": "template"})
    session = api.create(template_id="with-env", env_vars={"B": "session"})["id"]
    code = "import os\nprint(os.environ['A'], os.environ['B'])"

    assert api.run(session, code)["stdout"] == "template session\n"
    api.end(session)


def test_preloaded_modules_are_imported_before_the_code_runs(api: Api, make: Make) -> None:
    make(id="preloaded", preload=["json", "decimal"])
    code = "import sys\nprint('decimal' in sys.modules, 'fractions' in sys.modules)"

    assert in_a_session(api, "preloaded", code) == "True False\n"
    assert in_a_session(api, "python", code) == "False False\n"


def test_a_module_that_cannot_be_preloaded_fails_the_creation_of_a_session(
    api: Api, make: Make
) -> None:
    make(id="broken", preload=["no_such_module"])
    response = api.http.post(f"{V1}/sessions", json={"template_id": "broken"})

    assert "no_such_module" in problem(response, 422, "preload_failed")["detail"]


def test_a_template_that_cannot_start_does_not_empty_other_pools(api: Api, make: Make) -> None:
    make(id="broken-pool", preload=["no_such_module"], pool_size=2)
    make(id="sound-pool", pool_size=1)
    eventually(lambda: api.pool().get("sound-pool") == 1)
    api.end(api.create(template_id="sound-pool")["id"])

    eventually(lambda: api.pool().get("sound-pool") == 1)


def test_a_template_cannot_be_removed_before_its_last_session_ends(api: Api, make: Make) -> None:
    make(id="leaving", env={"A": "1"})
    session = api.create(template_id="leaving")["id"]
    problem(api.http.delete(f"{V1}/templates/leaving"), 409, "template_in_use")
    assert api.run(session, "import os\nprint(os.environ['A'])")["stdout"] == "1\n"

    api.end(session)

    assert api.http.delete(f"{V1}/templates/leaving").status_code == 204


def test_pool_size_is_honoured_as_the_template_changes(api: Api, make: Make) -> None:
    make(id="pooled", pool_size=2)
    eventually(lambda: api.pool().get("pooled") == 2)
    api.http.put(f"{V1}/templates/pooled", json={"name": "x", "pool_size": 1})
    eventually(lambda: api.pool().get("pooled") == 1)
    api.http.delete(f"{V1}/templates/pooled")

    eventually(lambda: api.pool().get("pooled", 0) == 0)


def test_sessions_of_a_changed_template_get_no_old_instances(api: Api, make: Make) -> None:
    code = "import sys\nprint('decimal' in sys.modules)"
    make(id="renewed", preload=["decimal"], pool_size=1)
    eventually(lambda: api.pool().get("renewed") == 1)
    api.http.put(f"{V1}/templates/renewed", json={"name": "x", "pool_size": 1})

    assert in_a_session(api, "renewed", code) == "False\n"


def test_a_template_recreated_with_the_same_id_gets_no_old_instances(api: Api, make: Make) -> None:
    code = "import sys\nprint('decimal' in sys.modules)"
    make(id="again", preload=["decimal"], pool_size=1)
    eventually(lambda: api.pool().get("again") == 1)
    api.http.delete(f"{V1}/templates/again")
    make(id="again", pool_size=1)

    assert in_a_session(api, "again", code) == "False\n"


def test_a_template_can_require_isolation_that_the_node_provides(api: Api, make: Make) -> None:
    health = answer(api.http.get(f"{V1}/runtimes/local/health"))
    made = make(id="strict", security_context={"require": health["provides"]})

    assert made["security_context"] == {"require": health["provides"]}
    assert in_a_session(api, "strict", "print(1)") == "1\n"


def test_isolation_that_the_node_lacks_is_refused(bubblewrap: str, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "no-control-groups")
    with Server(tmp_path, ATOLL_LOCAL__CGROUP_ROOT=nowhere) as server, server.client() as http:
        health = answer(http.get(f"{V1}/runtimes/local/health"))
        assert "cgroup_memory" in health["missing"]
        body = {"name": "x", "security_context": {"require": ["seccomp", "cgroup_memory"]}}
        error = problem(http.post(f"{V1}/templates", json=body), 422, "isolation_unavailable")

        assert error["missing"] == ["cgroup_memory"]
        assert in_a_session(Api(http), "python", "print(1)") == "1\n"


def test_runtimes_describe_the_node(api: Api) -> None:
    health = answer(api.http.get(f"{V1}/runtimes/local/health"))
    metrics = answer(api.http.get(f"{V1}/runtimes/local/metrics"))

    assert health["status"] == "healthy"
    assert set(health["provides"]).isdisjoint(health["missing"])
    assert metrics["cpu_count"] >= 1
    assert 0 <= metrics["cpu_usage"] <= 1
    assert 0 < metrics["mem_usage"] < 1
    assert metrics["mem_total"] > 2**28
    assert metrics["disk_free"] > 0
    assert json.dumps(metrics["pool"])
    for path in ("health", "metrics"):
        response = api.http.get(f"{V1}/runtimes/elsewhere/{path}")
        problem(response, 404, "runtime_not_found")


def test_a_node_counts_its_sessions(api: Api) -> None:
    def count() -> int:
        return int(answer(api.http.get(f"{V1}/runtimes/local/metrics"))["session_count"])

    before = count()
    session = api.create()["id"]
    assert count() == before + 1
    api.end(session)
    assert count() == before
