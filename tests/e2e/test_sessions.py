"""Sessions: created with requested options, listed, isolated and ended."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.api import V1, Api, answer, eventually, problem, until

if TYPE_CHECKING:
    from tests.harness import Server

pytestmark = pytest.mark.quick

# Creating


@pytest.mark.slow
@pytest.mark.every_driver
def test_a_created_session_is_running_when_the_response_arrives(api: Api) -> None:
    shown = api.create()

    assert shown["status"] == "running"
    assert shown["wanted"] == "running"
    assert shown["template_id"] == "python"
    assert shown["container_id"]
    assert shown["ended_at"] is None
    assert api.get(shown["id"]) == shown
    api.end(shown["id"])


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "in resources"])
def test_limits_are_those_of_the_request(api: Api, nested: bool) -> None:
    limits = {"cpu": "500m", "memory": "128Mi", "disk": "64Mi", "max_processes": 20}
    shown = api.create(**({"resources": limits} if nested else limits))

    assert shown["resources"] == {**limits, "cpu": "0.5"}
    code = "import os\ns = os.statvfs('/workspace')\nprint(s.f_blocks * s.f_frsize)"
    assert api.run(shown["id"], code)["status"] == "success"
    api.end(shown["id"])


def test_an_omitted_limit_comes_from_the_template(api: Api) -> None:
    shown = api.create(memory="256Mi")

    assert shown["resources"] == {
        "cpu": "1", "memory": "256Mi", "disk": "1Gi", "max_processes": 128,
    }  # fmt: skip
    api.end(shown["id"])


def test_a_session_is_created_without_a_body(api: Api) -> None:
    shown = answer(api.http.post(f"{V1}/sessions"), 201)

    assert (shown["template_id"], shown["status"]) == ("python", "running")
    api.end(shown["id"])


def test_the_life_of_a_session_is_that_of_the_request(api: Api) -> None:
    shown = api.create(timeout=77)

    assert shown["timeout"] == 77
    life = datetime.fromisoformat(shown["expires_at"]) - datetime.fromisoformat(shown["created_at"])
    assert life == timedelta(seconds=77)
    api.end(shown["id"])


def test_environment_variables_reach_every_language(api: Api) -> None:
    session = api.create(env_vars={"GREETING": "hällo"})["id"]

    assert api.run(session, "import os\nprint(os.environ['GREETING'])")["stdout"] == "hällo\n"
    assert api.run(session, "echo $GREETING", language="shell")["stdout"] == "hällo\n"
    assert api.get(session)["env_vars"] == {"GREETING": "hällo"}
    api.end(session)


@pytest.mark.parametrize(
    "body",
    [
        {"colour": "red"},
        {"timeout": 0},
        {"timeout": 86_401},
        {"timeout": "long"},
        {"timeout": 1.5},
        {"cpu": "0"},
        {"cpu": "many"},
        {"cpu": 1},
        {"cpu": "65"},
        {"memory": "1Mi"},
        {"memory": "0"},
        {"memory": "1024Ti"},
        {"memory": "-5"},
        {"disk": "1"},
        {"disk": "1Pi"},
        {"max_processes": 1},
        {"max_processes": 100_000},
        {"cpu": "1", "resources": {"cpu": "1"}},
        {"resources": {"gpu": "1"}},
        {"env_vars": {"": "x"}},
        {"env_vars": {"A B": "x"}},
        {"env_vars": {"A": 1}},
        {"template_id": "../x"},
        [],
        "python",
    ],
    ids=str,
)
def test_an_invalid_body_is_refused(api: Api, body: Any) -> None:
    problem(api.http.post(f"{V1}/sessions", json=body), 422, "invalid_request")


def test_an_unknown_template_is_not_found(api: Api) -> None:
    response = api.http.post(f"{V1}/sessions", json={"template_id": "nothing"})

    problem(response, 404, "template_not_found")


def test_ids_are_unique(api: Api, server: Server) -> None:
    def create(_: int) -> str:
        with server.client() as http:
            session_id = str(Api(http).create(timeout=60)["id"])
            Api(http).end(session_id)
            return session_id

    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(create, range(12)))

    assert len(set(made)) == 12


# Kept apart


def test_sessions_cannot_see_files_of_each_other(api: Api, session: str) -> None:
    other = api.create()["id"]
    api.put(session, "secret", b"mine")

    assert api.names(other) == []
    assert api.run(other, "import os\nprint(os.listdir('/workspace'))")["stdout"] == "['.tmp']\n"
    api.end(other)


def test_files_persist_between_executions(api: Api, session: str) -> None:
    api.run(session, "open('kept', 'w').write('here')")

    assert api.run(session, "print(open('kept').read())")["stdout"] == "here\n"


# Listing


def listed(api: Api, **params: Any) -> list[str]:
    found: list[str] = []
    while True:
        page = answer(api.http.get(f"{V1}/sessions", params=params))
        found += [item["id"] for item in page["items"]]
        if page["next_cursor"] is None:
            return found
        params["cursor"] = page["next_cursor"]


def test_sessions_are_listed_newest_first_page_by_page(api: Api) -> None:
    made = [api.create()["id"] for _ in range(5)]
    found = listed(api, limit=2)

    assert found[:5] == made[::-1]
    assert len(found) == len(set(found))
    for session in made:
        api.end(session)


def test_new_and_ended_sessions_do_not_change_later_pages(api: Api) -> None:
    made = [api.create()["id"] for _ in range(4)]
    first = answer(api.http.get(f"{V1}/sessions", params={"limit": 2}))
    newer = api.create()["id"]
    api.end(made[3])
    second = answer(
        api.http.get(f"{V1}/sessions", params={"limit": 2, "cursor": first["next_cursor"]})
    )

    assert [item["id"] for item in first["items"] + second["items"]] == made[::-1]
    for session in [*made, newer]:
        api.end(session)


def test_sessions_are_listed_by_status_and_template(api: Api, session: str) -> None:
    ended = api.create()["id"]
    api.end(ended)

    assert session in listed(api, status="running", limit=500)
    assert ended not in listed(api, status="running", limit=500)
    assert ended in listed(api, status="terminated", limit=500)
    assert session in listed(api, template_id="python", limit=500)
    assert listed(api, template_id="another") == []


@pytest.mark.parametrize(
    ("params", "status", "code"),
    [
        ({"status": "sleepy"}, 422, "invalid_request"),
        ({"limit": 0}, 422, "invalid_request"),
        ({"limit": 501}, 422, "invalid_request"),
        ({"limit": "x"}, 422, "invalid_request"),
        ({"cursor": "x"}, 400, "bad_cursor"),
        ({"cursor": "\x00"}, 400, "bad_cursor"),
        ({"cursor": "eyJ9"}, 400, "bad_cursor"),
    ],
    ids=str,
)
def test_an_invalid_list_query_is_refused(
    api: Api, params: dict[str, Any], status: int, code: str
) -> None:
    problem(api.http.get(f"{V1}/sessions", params=params), status, code)


# Ending


def lasting(shown: dict[str, Any]) -> dict[str, Any]:
    """The fields that stay unchanged while an ended session is cleared from the node."""
    passing = ("observed", "container_id", "updated_at")
    return {name: value for name, value in shown.items() if name not in passing}


def test_a_deleted_session_is_terminated_and_stays_readable(api: Api) -> None:
    session = api.create()["id"]
    execution_id = api.run(session, "print('kept')")["execution_id"]
    ended = api.end(session)

    assert (ended["status"], ended["cause"], ended["wanted"]) == (
        "terminated", "user", "destroyed",
    )  # fmt: skip
    assert ended["ended_at"] is not None
    assert lasting(api.get(session)) == lasting(ended)
    assert api.result(execution_id, wait=0)["stdout"] == "kept\n"
    url = f"{V1}/sessions/{session}/executions"
    assert [item["id"] for item in answer(api.http.get(url))["items"]] == [execution_id]
    assert [name for _, name, _ in api.events(execution_id)] == ["started", "stdout", "result"]


def test_deleting_a_session_twice_changes_nothing(api: Api) -> None:
    session = api.create()["id"]
    ended = api.end(session)

    assert lasting(api.end(session)) == lasting(ended)
    eventually(lambda: api.get(session)["observed"] == "destroyed")
    cleared = api.get(session)
    assert lasting(cleared) == lasting(ended)
    assert api.end(session) == cleared


def test_an_unknown_session_cannot_be_read_or_deleted(api: Api) -> None:
    problem(api.http.get(f"{V1}/sessions/sess_nobody"), 404, "session_not_found")
    problem(api.http.delete(f"{V1}/sessions/sess_nobody"), 404, "session_not_found")


def test_an_ended_session_takes_no_executions_and_no_files(api: Api) -> None:
    session = api.create()["id"]
    api.end(session)

    assert problem(api.execute(session, code="1"), 409, "session_ended")["status_now"] == (
        "terminated"
    )
    url = f"{V1}/sessions/{session}/files"
    problem(api.http.get(url), 409, "session_ended")
    problem(api.http.get(f"{url}/x"), 409, "session_ended")
    problem(api.http.put(f"{url}/x", content=b"x"), 409, "session_ended")


def test_deleting_a_session_cancels_its_running_and_queued_executions(api: Api) -> None:
    session = api.create()["id"]
    running = api.submit(session, "print('before')\n" + until("never"))
    waiting = [api.submit(session, "print(1)") for _ in range(3)]
    next(name for _, name, _ in api.events(running) if name == "stdout")
    api.end(session)

    result = api.result(running)
    assert (result["status"], result["cause"]) == ("error", "user")
    assert result["stdout"] == "before\n"
    assert result["exit_code"] is None
    assert api.status(running) == "cancelled"
    for execution_id in waiting:
        assert api.result(execution_id)["status"] == "error"
        assert api.status(execution_id) == "cancelled"


def test_a_follower_receives_the_end_of_the_session(api: Api) -> None:
    session = api.create()["id"]
    execution_id = api.submit(session, "print(1)\n" + until("never"))
    names = []
    for _, name, _ in api.events(execution_id):
        names.append(name)
        if name == "stdout":
            api.end(session)

    assert names == ["started", "stdout", "result"]


@pytest.mark.slow
def test_a_session_ends_automatically_when_it_expires(api: Api) -> None:
    session = api.create(timeout=8)["id"]
    execution_id = api.run(session, "print('in time')")["execution_id"]
    eventually(lambda: api.get(session)["status"] == "timeout", 30)

    ended = api.get(session)
    assert ended["cause"] == "timeout"
    assert ended["ended_at"] >= ended["expires_at"]
    assert api.result(execution_id, wait=0)["stdout"] == "in time\n"
    assert api.end(session)["status"] == "timeout"
    problem(api.execute(session, code="1"), 409, "session_ended")


def test_executions_of_an_expired_session_time_out(api: Api) -> None:
    session = api.create(timeout=60)["id"]
    execution_id = api.submit(session, "print('before')\n" + until("never"))
    next(name for _, name, _ in api.events(execution_id) if name == "stdout")
    answer(api.http.patch(f"{V1}/sessions/{session}", json={"timeout": 1}))
    result = api.result(execution_id)

    assert (result["status"], result["cause"]) == ("timeout", "timeout")
    assert result["stdout"] == "before\n"
    assert api.status(execution_id) == "timeout"
    assert api.get(session)["status"] == "timeout"


def test_an_ended_session_leaves_nothing_on_the_node(api: Api, server: Server) -> None:
    shown = api.create()
    instance = server.data_dir / "node" / "instances" / shown["container_id"]
    assert instance.exists()
    before = set((server.data_dir / "node" / "workspaces").iterdir())
    api.put(shown["id"], "file", b"x")
    api.end(shown["id"])

    eventually(lambda: not instance.exists())
    eventually(lambda: before - set((server.data_dir / "node" / "workspaces").iterdir()))
