"""
An instance is checked before it is used: a dead one is replaced, once, by the request that needs
it. If that is impossible, the response has a Retry-After header.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from atoll.service.sessions import transitions
from tests import drivers
from tests.drivers import PAUSE, pausing
from tests.e2e.api import V1, Api, answer, eventually, problem, sh
from tests.e2e.test_lifecycle import do, made, patch, post
from tests.e2e.test_recovery import handle, runs
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx

pytestmark = pytest.mark.quick

BOUND = 30.0
"""Seconds within which every request must return, whatever the driver does."""
QUICK_RETRIES = {
    f"{transitions.__name__}.RETRY_BACKOFF": 0.2,
    f"{transitions.__name__}.ERROR_RETRY": 1.0,
}
QUICK = {
    "ATOLL_POOL__SIZE": "0",
    "ATOLL_SESSION__SWEEP": "0.5",
    "ATOLL_SESSION__RETRIES": "2",
}


class Node:
    """A server whose driver can be made unavailable."""

    def __init__(self, server: Server, bubblewrap: Path) -> None:
        self.server = server
        self.bubblewrap = bubblewrap

    def down(self) -> None:
        """No instance can be started."""
        self.bubblewrap.chmod(0o600)

    def up(self) -> None:
        self.bubblewrap.chmod(0o755)


@pytest.fixture(scope="module")
def node(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    # Where any uid can reach it.
    with tempfile.TemporaryDirectory(prefix="atoll-health-") as directory:
        os.chmod(directory, 0o755)
        program = Path(directory) / "bwrap"
        shutil.copy(bubblewrap, program)
        program.chmod(0o755)
        data = tmp_path_factory.mktemp("health")
        # Instances that are forks need no bubblewrap.
        settings = {"ATOLL_LOCAL__BUBBLEWRAP": str(program), "ATOLL_LOCAL__FORK_SERVER": "false"}
        with Server(data, **QUICK, **settings).with_constants(QUICK_RETRIES) as server:
            yield Node(server, program)
            program.chmod(0o755)


@pytest.fixture(scope="module")
def api(node: Node) -> Iterator[Api]:
    with node.server.client() as http:
        http.timeout = BOUND
        yield Api(http)


@pytest.fixture
def down(node: Node) -> Iterator[Callable[[], None]]:
    """Makes the driver unavailable until the end of the test."""
    yield node.down
    node.up()


def kill(server: Server, api: Api, session: str) -> str:
    """From outside, as the machine would; the id of what was killed."""
    instance = str(api.get(session)["container_id"])
    pid = int(handle(server, instance)["child"])
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not runs(pid))
    return instance


def read(api: Api, session: str, name: str = "kept") -> httpx.Response:
    return api.http.get(f"{V1}/sessions/{session}/files/{name}")


# Killed


@pytest.mark.slow
@pytest.mark.every_driver
@pytest.mark.parametrize("by", ["file", "execution", "context", "upload", "processes"])
def test_a_killed_instance_is_replaced_within_one_request(
    api: Api, node: Node, session: str, by: str
) -> None:
    api.put(session, "kept", b"here")
    with made(node.server) as names:
        lost = kill(node.server, api, session)
        if by == "file":
            assert read(api, session).content == b"here"
        elif by == "execution":
            assert api.run(session, "print(open('kept').read())")["stdout"] == "here\n"
        elif by == "context":
            answer(api.http.post(f"{V1}/sessions/{session}/contexts", json={}), 201)
        elif by == "upload":
            api.put(session, "other", b"x")
        else:
            answer(api.http.get(f"{V1}/sessions/{session}/processes"))
    shown = api.get(session)
    assert (shown["status"], shown["cause"], shown["failures"]) == ("running", None, 0)
    assert names == {shown["container_id"]}
    assert shown["container_id"] != lost
    assert sh(api, session, "cat kept") == "here"


def test_requests_at_once_after_a_kill_cause_one_recovery(
    api: Api, node: Node, session: str
) -> None:
    api.put(session, "kept", b"here")
    for _ in range(3):
        with made(node.server) as names, ThreadPoolExecutor(12) as pool:
            kill(node.server, api, session)
            found = list(pool.map(lambda _: read(api, session), range(12)))
        assert {(one.status_code, one.content) for one in found} == {(200, b"here")}
        assert names == {api.get(session)["container_id"]}


@pytest.mark.slow
@pytest.mark.every_driver
def test_an_instance_that_dies_repeatedly_is_replaced_each_time(
    api: Api, node: Node, session: str
) -> None:
    api.put(session, "kept", b"here")
    seen = set()
    for _ in range(5):
        seen.add(kill(node.server, api, session))
        assert read(api, session).content == b"here"
    assert len(seen) == 5
    eventually(lambda: not seen & drivers.instances(node.server.data_dir))


@pausing
def test_a_paused_instance_that_is_killed_is_replaced(api: Api, node: Node, session: str) -> None:
    api.put(session, "kept", b"here")
    do(api, session, "pause")
    instance = str(api.get(session)["container_id"])
    os.kill(int(handle(node.server, instance)["child"]), signal.SIGKILL)

    assert read(api, session).content == b"here"
    assert api.get(session)["container_id"] != instance


@pytest.mark.parametrize("verb", ["stop", "archive", PAUSE, "start", "clone"])
def test_every_request_works_after_a_kill(api: Api, node: Node, session: str, verb: str) -> None:
    api.put(session, "kept", b"here")
    kill(node.server, api, session)
    shown = answer(post(api, session, verb), 201 if verb == "clone" else 200)

    assert shown["status"] in ("stopped", "archived", "paused", "running")
    assert sh(api, shown["id"], "cat kept") == "here"
    assert sh(api, session, "cat kept") == "here"
    if verb == "clone":
        api.end(shown["id"])


@pytest.mark.slow
def test_a_session_whose_instance_died_while_no_server_ran_can_be_changed(
    bubblewrap: str, tmp_path: Path
) -> None:
    verbs = ("stop", "archive", "start", "patch", "delete")
    with Server(tmp_path, **QUICK).with_constants(QUICK_RETRIES) as server:
        with server.client() as http:
            api = Api(http)
            sessions = {verb: str(api.create()["id"]) for verb in verbs}
            pids = []
            for session in sessions.values():
                api.put(session, "kept", b"here")
                pids.append(int(handle(server, api.get(session)["container_id"])["child"]))
        server.stop(signal.SIGKILL)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not any(map(runs, pids)))
        server.start()
        with server.client() as http:
            api = Api(http)
            for verb in ("stop", "archive", "start"):
                do(api, sessions[verb], verb)
            shown = answer(patch(api, sessions["patch"], labels={"a": "b"}))
            assert shown["labels"] == {"a": "b"}
            assert api.end(sessions.pop("delete"))["status"] == "terminated"
            for session in sessions.values():
                assert sh(api, session, "cat kept") == "here"
                api.end(session)


# Out of memory


def test_an_instance_ended_by_the_oom_killer_is_replaced(api: Api, node: Node) -> None:
    session = api.create(memory="64Mi")["id"]
    api.put(session, "kept", b"here")
    greedy = (
        "import os\nfor _ in range(8):\n    if os.fork() == 0: break\n"
        "x = []\nwhile True: x.append(bytearray(b'x' * 2**22))"
    )
    result = api.run(session, greedy, timeout=20, wait=60)
    assert (result["status"], result["cause"]) == ("failed", "oom"), result

    assert read(api, session).content == b"here"
    # A process that is about to die may take the next with it.
    eventually(lambda: api.run(session, "print(1)")["stdout"] == "1\n")
    shown = api.get(session)
    assert (shown["status"], shown["cause"]) == ("running", None)
    api.end(session)


# The sweep


@pytest.mark.slow
@pytest.mark.every_driver
def test_the_orphan_sweep_removes_nothing_of_recovered_sessions(api: Api, node: Node) -> None:
    """It runs every half second here, while instances are lost, replaced, stopped and started."""
    sessions = [str(api.create()["id"]) for _ in range(3)]
    for session in sessions:
        api.put(session, "kept", b"here")
    over = time.monotonic() + 6

    def torment(session: str) -> int:
        rounds = 0
        while time.monotonic() < over:
            kill(node.server, api, session)
            assert read(api, session).content == b"here"
            do(api, session, "stop")
            assert read(api, session).content == b"here"
            rounds += 1
        return rounds

    with ThreadPoolExecutor(len(sessions)) as pool:
        assert all(pool.map(torment, sessions))
    for session in sessions:
        assert sh(api, session, "cat kept") == "here"
        api.end(session)


# The driver is down


def test_without_a_driver_responses_contain_retry_after(
    api: Api, node: Node, session: str, down: Callable[[], None]
) -> None:
    api.put(session, "kept", b"here")
    kill(node.server, api, session)
    down()
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: read(api, session), range(6)))

    for one in found:
        problem(one, 503, "session_not_ready")
        assert int(one.headers["retry-after"]) >= 1
    node.up()
    eventually(lambda: read(api, session).status_code == 200, BOUND)
    assert read(api, session).content == b"here"


def test_without_a_driver_running_instances_keep_working(
    api: Api, node: Node, session: str, down: Callable[[], None]
) -> None:
    down()

    assert api.run(session, "print(1)")["stdout"] == "1\n"
    api.put(session, "kept", b"here")
    assert do(api, session, "stop")["status"] == "stopped"
    node.up()
    assert sh(api, session, "cat kept") == "here"


def test_a_session_that_cannot_start_is_in_error_and_recovers_automatically(
    api: Api, node: Node, session: str, down: Callable[[], None]
) -> None:
    api.put(session, "kept", b"here")
    do(api, session, "stop")
    down()
    refused = post(api, session, "start")
    assert refused.status_code == 503, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    shown: dict[str, Any] = {}

    def in_error() -> bool:
        # Between two tries: each makes it `starting` again.
        shown.update(api.get(session))
        return bool(shown["status"] == "error")

    eventually(in_error, BOUND)
    assert (shown["cause"], shown["wanted"], shown["observed"]) == ("driver", "running", "error")
    assert shown["failures"] > 2
    assert shown["message"]
    assert shown["retry_at"] is not None
    # A request for it is still possible and gets the same response.
    problem(read(api, session), 503, "session_not_ready")
    node.up()
    eventually(lambda: api.get(session)["status"] == "running", BOUND)
    shown = api.get(session)
    assert (shown["cause"], shown["message"], shown["failures"]) == (None, None, 0)
    assert read(api, session).content == b"here"


def test_a_killed_instance_is_replaced_after_a_failed_request(
    api: Api, node: Node, session: str, down: Callable[[], None]
) -> None:
    lost = kill(node.server, api, session)
    down()
    problem(read(api, session), 503, "session_not_ready")
    node.up()

    eventually(lambda: api.get(session)["status"] == "running", BOUND)
    assert api.get(session)["container_id"] not in (None, lost)


@pytest.mark.parametrize("verb", ["stop", "delete", "patch", "archive"])
def test_a_session_in_error_can_be_deleted(
    api: Api, node: Node, down: Callable[[], None], verb: str
) -> None:
    session = api.create()["id"]
    api.put(session, "kept", b"here")
    kill(node.server, api, session)
    down()
    post(api, session, "start")
    problem(read(api, session), 503, "session_not_ready")
    eventually(lambda: api.get(session)["status"] == "error", BOUND)
    if verb == "delete":
        assert api.end(session)["status"] == "terminated"
        eventually(lambda: api.get(session)["observed"] == "destroyed", BOUND)
        return
    if verb == "patch":
        assert answer(patch(api, session, labels={"a": "b"}))["labels"] == {"a": "b"}
    elif verb == "stop":
        assert do(api, session, "stop")["status"] == "stopped"
    else:
        # That needs an instance, and waits for one.
        post(api, session, "archive", params={"wait": 1})
        assert api.get(session)["wanted"] == "archived"
    node.up()
    if verb == "archive":
        eventually(lambda: api.get(session)["status"] == "archived", BOUND)
    eventually(lambda: read(api, session).status_code == 200, BOUND)
    assert sh(api, session, "cat kept") == "here"
    api.end(session)


@pytest.mark.slow
def test_an_execution_does_not_wait_for_an_unavailable_driver(
    api: Api, node: Node, session: str, down: Callable[[], None]
) -> None:
    kill(node.server, api, session)
    down()
    body = {"code": "print(1)", "wait": BOUND}
    url = f"{V1}/sessions/{session}/execute"
    response: dict[str, Any] = answer(api.http.post(url, json=body, timeout=2 * BOUND))

    assert (response["status"], response["cause"]) == ("error", "instance_lost"), response


@pytest.mark.slow
def test_an_unwritable_directory_counts_as_an_unavailable_driver(
    bubblewrap: str, tmp_path: Path
) -> None:
    """A file blocks the path of the directory, since root can write everywhere."""
    with Server(tmp_path, **QUICK).with_constants(QUICK_RETRIES) as server, server.client() as http:
        api = Api(http)
        session = api.create()["id"]
        api.put(session, "kept", b"here")
        do(api, session, "stop")
        instances = server.data_dir / "node" / "instances"
        instances.rename(instances.with_name("away"))
        try:
            problem(read(api, session), 503, "session_not_ready")
        finally:
            instances.with_name("away").rename(instances)
        eventually(lambda: read(api, session).status_code == 200, BOUND)
        api.end(session)


@pytest.mark.slow
def test_many_sessions_get_timely_responses_while_the_driver_is_unavailable(
    api: Api, node: Node, down: Callable[[], None]
) -> None:
    sessions = [str(api.create()["id"]) for _ in range(4)]
    for session in sessions:
        api.put(session, "kept", b"here")
        kill(node.server, api, session)
    down()
    with ThreadPoolExecutor(12) as pool:
        found = pool.map(lambda session: read(api, session).status_code, sessions * 3)
        assert set(found) == {503}
    node.up()
    for session in sessions:
        eventually(lambda session=session: read(api, session).status_code == 200, BOUND)  # type: ignore[misc]
        api.end(session)
