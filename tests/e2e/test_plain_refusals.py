"""Errors of requests that cannot be served explain how to correct them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.api import V1, Api, answer, problem

if TYPE_CHECKING:
    from tests.harness import Server

pytestmark = pytest.mark.quick

GIB = 2**30


@pytest.fixture
def too_much(api: Api) -> list[dict[str, str]]:
    """One core more than the only node has, and memory beyond its last GiB."""
    (node,) = answer(api.http.get(f"{V1}/nodes"))["items"]
    cores, memory = node["cpu_count"] + 1, -(-node["mem_total"] // GIB) + 1
    if cores > 64 or memory > 64:
        pytest.skip("session.max_cpu and session.max_memory are below the size of this machine")
    return [{"cpu": str(cores)}, {"memory": f"{memory}Gi"}]


def test_more_resources_than_any_node_has_are_refused(
    api: Api, session: str, too_much: list[dict[str, str]]
) -> None:
    for limits in too_much:
        (field,) = limits
        for refused in (
            api.http.post(f"{V1}/sessions", json=limits),
            api.http.patch(f"{V1}/sessions/{session}", json=limits),
            api.http.post(f"{V1}/sessions/{session}/clone", json=limits),
            api.http.post(f"{V1}/templates", json={"name": "x", "default_resources": limits}),
        ):
            error = problem(refused, 422, "exceeds_nodes")
            assert error["field"] == field
            assert "of the largest node" in error["detail"]


@pytest.mark.parametrize(
    "name", ["git+https://user:secret@example.org/a.git", "./a", "a-1.0-py3-none-any.whl"]
)
def test_a_package_from_elsewhere_is_refused_with_the_allowed_forms(
    api: Api, session: str, name: str
) -> None:
    wanted = [{"name": name}]
    for refused in (
        api.http.post(f"{V1}/sessions", json={"dependencies": wanted}),
        api.http.post(f"{V1}/sessions/{session}/dependencies", json={"dependencies": wanted}),
        api.http.post(f"{V1}/templates", json={"name": "x", "python_packages": [name]}),
    ):
        error = problem(refused, 422, "invalid_request")
        assert "Packages come from the server's index" in error["detail"]
        assert name not in error["detail"]


def test_an_error_about_an_unknown_key_contains_the_source_of_the_key(server: Server) -> None:
    done = server.atoll("session", "list", "--api-key", "atoll_unknown")
    assert done.returncode == 1
    assert "The key is from the api_key argument (--api-key). (key_unknown)" in done.stderr
