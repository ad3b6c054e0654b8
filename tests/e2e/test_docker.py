"""Sessions on a Docker engine, through the API."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from atoll import ids
from atoll.service.sessions import connections, transitions
from atoll.settings import LocalSettings
from tests import drivers, preloaded
from tests.e2e.api import V1, Api, answer, eventually, problem, sh, until
from tests.e2e.test_lifecycle import await_state, do, post
from tests.harness import Server
from tests.servers.docker import Dockerd
from tests.servers.images import PYTHON, Archives

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx


LONG = 60.0
"""Time limit in seconds for events that are expected."""
QUICK_RETRIES = {
    f"{transitions.__name__}.RETRY_BACKOFF": 0.2,
    f"{transitions.__name__}.ERROR_RETRY": 1.0,
    f"{connections.__name__}.PROBE_INTERVAL": 0.0,
}
QUICK = {
    "ATOLL_POOL__SIZE": "0",
    "ATOLL_SESSION__SWEEP": "0.5",
    "ATOLL_SESSION__RETRIES": "2",
    "ATOLL_NODE__PROBE": "0.5",
    "ATOLL_NODE__UNHEALTHY_AFTER": "2",
}


@pytest.fixture(scope="module")
def server(dockerd: Dockerd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("docker")
    with Server(directory, **QUICK, **drivers.settings(dockerd.url)).with_constants(
        QUICK_RETRIES
    ) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[Api]:
    with calling(server) as api:
        yield api


@pytest.fixture(scope="module")
def mortal(image_archives: Archives, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dockerd]:
    """An engine that tests may stop."""
    with Dockerd(tmp_path_factory.mktemp("mortal")) as running:
        yield image_archives.load(running)


@pytest.fixture(scope="module")
def lone(mortal: Dockerd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that uses the engine `mortal`."""
    directory = tmp_path_factory.mktemp("lone")
    with Server(directory, **QUICK, **drivers.settings(mortal.url)).with_constants(
        QUICK_RETRIES
    ) as running:
        yield running


@contextmanager
def calling(server: Server) -> Iterator[Api]:
    with server.client() as http:
        yield Api(http)


def container(api: Api, session: str) -> str:
    return f"atoll-{api.get(session)['container_id']}"


def read(api: Api, session: str, name: str = "kept") -> httpx.Response:
    return api.http.get(f"{V1}/sessions/{session}/files/{name}")


def node(api: Api) -> dict[str, Any]:
    (found,) = answer(api.http.get(f"{V1}/nodes"))["items"]
    return dict(found)


def attempts(api: Api, execution: str) -> list[str | None]:
    return [attempt["cause"] for attempt in api.execution(execution)["attempts"]]


# The node


def test_a_docker_node_reports_its_type_and_capabilities(api: Api) -> None:
    reported = node(api)

    assert (reported["type"], reported["status"], reported["problem"]) == (
        "docker",
        "healthy",
        None,
    )
    assert {"cgroup_memory", "cgroup_cpu", "cgroup_pids", "seccomp"} <= set(reported["provides"])
    assert {"pause", "copy"} <= set(reported["features"])
    # Each with a reason.
    assert all(reported["missing"].values())


@pytest.mark.quick
def test_a_session_is_a_container_of_this_node(api: Api, dockerd: Dockerd, session: str) -> None:
    found = dockerd.inspect(container(api, session))

    assert found["State"]["Running"]
    assert found["Config"]["Labels"]["atoll.instance"] == api.get(session)["container_id"]
    assert dockerd.image(PYTHON)["Id"] == found["Image"]
    assert sh(api, session, "cat /etc/mark") == "from the image"


def test_a_template_can_require_limits_enforced_by_the_kernel(api: Api) -> None:
    assert node(api)["missing"] == {}
    require = ["own_uid", "disk_quota"]
    demanding = {"id": "demanding", "name": "x", "security_context": {"require": require}}
    answer(api.http.post(f"{V1}/templates", json=demanding), 201)
    session = api.create(template_id="demanding", disk="16Mi")["id"]

    code = "import os; s = os.statvfs('.'); print(s.f_blocks * s.f_frsize >> 20, os.getuid())"
    size, uid = api.run(session, code)["stdout"].split()
    assert 12 <= int(size) <= 16
    assert int(uid) >= LocalSettings().uid_base
    api.end(session)


# The server


def test_a_restarted_server_finds_its_sessions(dockerd: Dockerd, tmp_path: Path) -> None:
    with Server(tmp_path, **QUICK, **drivers.settings(dockerd.url)).with_constants(
        QUICK_RETRIES
    ) as server:
        with calling(server) as api:
            sessions = {verb: str(api.create()["id"]) for verb in ("start", "pause", "stop")}
            for verb, session in sessions.items():
                api.put(session, "kept", b"here")
                do(api, session, verb)
            before = {session: api.get(session) for session in sessions.values()}
        server.stop(signal.SIGKILL)
        server.start()
        with calling(server) as api:
            for verb, session in sessions.items():
                assert api.get(session) == before[session]
                assert read(api, session).content == b"here"
                found = api.get(session)["container_id"]
                assert (found == before[session]["container_id"]) == (verb != "stop")
                api.end(session)


def test_two_servers_on_one_engine_do_not_touch_each_others_containers(
    api: Api, session: str, dockerd: Dockerd, tmp_path: Path
) -> None:
    before = api.get(session)["container_id"]
    with Server(
        tmp_path, "--stop-sessions", **QUICK, **drivers.settings(dockerd.url)
    ).with_constants(QUICK_RETRIES) as other:
        with calling(other) as theirs:
            made = theirs.create()["id"]
            assert theirs.run(made, "print(1)")["stdout"] == "1\n"
            gone = container(theirs, made)
        assert other.stop() == 0
        assert gone.removeprefix("atoll-") not in names(dockerd)
    assert api.run(session, "print(2)")["stdout"] == "2\n"
    assert api.get(session)["container_id"] == before


@pytest.mark.parametrize("runtime", ["runc", "runsc"])
def test_containers_end_when_no_server_connects_for_a_while(
    request: pytest.FixtureRequest, dockerd: Dockerd, tmp_path: Path, runtime: str
) -> None:
    """Even while code runs. The next server finds the session's files."""
    if runtime == "runsc":
        request.getfixturevalue("runsc")
    soon = {"ATOLL_LINK__UNATTENDED_GRACE": "1", "ATOLL_LINK__UNATTENDED_LIMIT": "2"}
    settings = drivers.settings(dockerd.url) | {"ATOLL_DOCKER__RUNTIME": runtime}
    with Server(tmp_path, **QUICK, **settings, **soon).with_constants(QUICK_RETRIES) as server:
        with calling(server) as api:
            session = api.create(capacity=2)["id"]
            api.put(session, "kept", b"here")
            name = container(api, session)
            api.await_status(api.submit(session, "while True: pass"), "running")
        server.stop(signal.SIGKILL)
        eventually(lambda: not dockerd.inspect(name)["State"]["Running"])
        server.start()
        with calling(server) as api:
            assert read(api, session).content == b"here"


def test_gc_removes_containers_and_mounts_of_a_removed_data_directory(
    api: Api, dockerd: Dockerd, session: str, tmp_path: Path
) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    settings = drivers.settings(dockerd.url)
    server = Server(directory, **QUICK, **settings).with_constants(QUICK_RETRIES).start()
    with calling(server) as other:
        name = container(other, other.create()["id"])
    server.stop(signal.SIGKILL)
    # Mount points cannot be removed.
    shutil.rmtree(directory, ignore_errors=True)
    assert mounted_below(directory)

    done = preloaded.run("gc", "--json", env=settings)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert (found["data_dir"], found["containers"]) == (str(directory), 1)
    assert name.removeprefix("atoll-") not in names(dockerd)
    assert not mounted_below(directory)
    assert api.run(session, "print(1)")["stdout"] == "1\n"


def mounted_below(place: Path) -> list[str]:
    return [
        line
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if f" {place}/" in line
    ]


def names(dockerd: Dockerd) -> set[str]:
    """Ids of all instances on an engine, of any server."""
    found = dockerd.containers(label=["atoll.instance"])
    return {one["Labels"]["atoll.instance"] for one in found}


# Changes by other clients of the engine

FATES = {
    "killed": ("POST", "kill"),
    "stopped": ("POST", "stop?t=30"),
    "removed": ("DELETE", "?force=1"),
}


def strike(dockerd: Dockerd, name: str, fate: str) -> None:
    method, what = FATES[fate]
    dockerd.ask(method, f"/containers/{name}{'' if what.startswith('?') else '/'}{what}")


@pytest.mark.parametrize("fate", FATES)
def test_a_container_ended_by_another_client_is_replaced_at_the_next_use(
    api: Api, dockerd: Dockerd, session: str, fate: str
) -> None:
    api.put(session, "kept", b"here")
    before = api.get(session)["container_id"]
    strike(dockerd, container(api, session), fate)

    assert read(api, session).content == b"here"
    shown = api.get(session)
    assert (shown["status"], shown["cause"], shown["failures"]) == ("running", None, 0)
    assert shown["container_id"] != before
    eventually(lambda: before not in names(dockerd))


@pytest.mark.parametrize("fate", FATES)
def test_executions_of_an_ended_container_are_retried_with_the_cause(
    api: Api, dockerd: Dockerd, session: str, fate: str
) -> None:
    code = "with open('log', 'a') as log: log.write('x')\n" + until("go") + "print('done')"
    execution = api.submit(session, code, timeout=LONG)
    eventually(lambda: read(api, session, "log").text == "x")
    strike(dockerd, container(api, session), fate)
    eventually(lambda: read(api, session, "log").text == "xx", LONG)
    api.put(session, "go")

    result = api.result(execution)
    assert (result["status"], result["stdout"]) == ("success", "done\n")
    cause = "evicted" if fate == "stopped" else "instance_lost"
    assert attempts(api, execution) == [cause, None]
    assert sh(api, session, "cat log") == "xx"


def test_a_container_paused_by_another_client_is_resumed_at_the_next_use(
    api: Api, dockerd: Dockerd, session: str
) -> None:
    context = answer(api.http.post(f"{V1}/sessions/{session}/contexts", json={}), 201)["id"]
    api.run(session, "x = 41", context_id=context)
    before = container(api, session)
    for _ in range(2):
        dockerd.ask("POST", f"/containers/{before}/pause")
        assert api.run(session, "print(1)")["stdout"] == "1\n"
    assert api.run(session, "print(x + 1)", context_id=context)["stdout"] == "42\n"
    assert container(api, session) == before
    assert not dockerd.inspect(before)["State"]["Paused"]


def test_a_paused_session_resumed_by_another_client_is_running(
    api: Api, dockerd: Dockerd, session: str
) -> None:
    do(api, session, "pause")
    before = container(api, session)
    dockerd.ask("POST", f"/containers/{before}/unpause")

    assert api.run(session, "print(1)")["stdout"] == "1\n"
    assert container(api, session) == before
    assert api.get(session)["status"] == "running"


@pytest.mark.parametrize("fate", FATES)
def test_a_paused_session_keeps_its_files_when_its_container_ends(
    api: Api, dockerd: Dockerd, session: str, fate: str
) -> None:
    api.put(session, "kept", b"here")
    do(api, session, "pause")
    strike(dockerd, container(api, session), fate)

    assert read(api, session).content == b"here"
    assert api.get(session)["status"] == "running"


def test_orphaned_containers_are_removed_when_the_server_starts(
    dockerd: Dockerd, tmp_path: Path
) -> None:
    with Server(tmp_path, **QUICK, **drivers.settings(dockerd.url)).with_constants(
        QUICK_RETRIES
    ) as server:
        with calling(server) as api:
            session = api.create()
            labels = dockerd.inspect(container(api, session["id"]))["Config"]["Labels"]
        orphan, stranger = ids.instance_id(), ids.instance_id()
        create_orphan(dockerd, orphan, labels["atoll.node"])
        create_orphan(dockerd, stranger, "somebody else's")
        server.stop(signal.SIGKILL)
        server.start()
        try:
            assert orphan not in names(dockerd)
            assert {stranger, session["container_id"]} <= names(dockerd)
        finally:
            dockerd.remove(f"atoll-{stranger}")
        with calling(server) as api:
            assert api.run(session["id"], "print(1)")["stdout"] == "1\n"


def create_orphan(dockerd: Dockerd, instance_id: str, node: str) -> None:
    """A container with a node's labels that its server did not make."""
    about = {
        "Image": PYTHON,
        "Cmd": ["sleep", "600"],
        "Labels": {"atoll.node": node, "atoll.instance": instance_id, "atoll.workspace": "none"},
        "HostConfig": {"NetworkMode": "none"},
    }
    name = f"atoll-{instance_id}"
    dockerd.ask("POST", "/containers/create", params={"name": name}, json=about)
    dockerd.ask("POST", f"/containers/{name}/start")


# The engine


def test_a_node_without_its_engine_is_unhealthy_and_recovers(lone: Server, mortal: Dockerd) -> None:
    with calling(lone) as api:
        session = api.create(timeout=3600)["id"]
        resting = api.create(timeout=3600)["id"]
        for one in (session, resting):
            api.put(one, "kept", b"here")
        do(api, resting, "stop")
        mortal.stop()

        eventually(lambda: node(api)["status"] == "unhealthy", LONG)
        assert "Docker engine" in node(api)["problem"]
        for one in (session, resting):
            refused = read(api, one)
            problem(refused, 503, refused.json()["code"])
            assert refused.json()["code"] in (
                "session_not_ready",
                "engine_unavailable",
                "instance_not_observed",
            )
            assert int(refused.headers["retry-after"]) >= 1
        refused = api.http.post(f"{V1}/sessions", json={})
        assert refused.status_code == 503, refused.text

        mortal.start()
        eventually(lambda: node(api)["status"] == "healthy", LONG)
        assert node(api)["problem"] is None
        for one in (session, resting):
            eventually(lambda one=one: read(api, one).status_code == 200, LONG)  # type: ignore[misc]
            assert read(api, one).content == b"here"
            assert api.run(one, "print(1)")["stdout"] == "1\n"
            assert api.get(one)["status"] == "running"
        assert api.run(api.create()["id"], "print(1)")["stdout"] == "1\n"
        assert "Traceback" not in lone.stderr()


@pytest.mark.parametrize("end", ["crash", "kill"])
def test_sessions_keep_their_files_when_the_engine_dies(
    lone: Server, mortal: Dockerd, end: str
) -> None:
    with calling(lone) as api:
        session = api.create(timeout=3600)["id"]
        api.put(session, "kept", b"here")
        execution = api.submit(session, until("go") + "print('done')", timeout=600)
        api.await_status(execution, "running")
        mortal.crash() if end == "crash" else mortal.kill()
        eventually(lambda: node(api)["problem"] is not None, LONG)
        mortal.start()

        eventually(lambda: read(api, session).status_code == 200, LONG)
        assert read(api, session).content == b"here"
        api.put(session, "go")
        result = api.result(execution)
        # It is retried if attempts are left.
        assert (result["status"], result["stdout"]) == ("success", "done\n"), result
        assert api.get(session)["status"] == "running"


def test_a_hanging_engine_does_not_block_running_executions(lone: Server, mortal: Dockerd) -> None:
    with calling(lone) as api:
        session = api.create(timeout=3600)["id"]
        api.put(session, "kept", b"here")
        mortal.pause()
        try:
            assert read(api, session).content == b"here"
            assert api.run(session, "print(1)")["stdout"] == "1\n"
        finally:
            mortal.resume()
        assert do(api, session, "stop")["status"] == "stopped"
        assert read(api, session).content == b"here"


def test_sessions_survive_when_engine_and_server_stop_together(
    lone: Server, mortal: Dockerd
) -> None:
    with calling(lone) as api:
        session = api.create(timeout=3600)["id"]
        api.put(session, "kept", b"here")
    lone.stop(signal.SIGKILL)
    mortal.restart()
    lone.start()

    with calling(lone) as api:
        assert read(api, session).content == b"here"
        assert api.run(session, "print(1)")["stdout"] == "1\n"
        # Containers that ended with the engine are removed at the start.
        assert names(mortal) <= held(api)


def held(api: Api) -> set[str]:
    """Ids of the instances of sessions."""
    items = answer(api.http.get(f"{V1}/sessions?limit=500"))["items"]
    return {item["container_id"] for item in items} - {None}


# The life of a session


def test_a_session_keeps_its_files_through_all_states(
    api: Api, dockerd: Dockerd, session: str
) -> None:
    api.put(session, "kept", b"here")
    assert do(api, session, "pause")["status"] == "paused"
    assert dockerd.inspect(container(api, session))["State"]["Paused"]
    clone = answer(post(api, session, "clone"), 201)["id"]
    assert do(api, session, "resume")["status"] == "running"
    before = api.get(session)["container_id"]
    assert do(api, session, "stop")["status"] == "stopped"
    assert before not in names(dockerd)
    assert do(api, session, "start")["status"] == "running"
    assert do(api, session, "archive")["status"] == "archived"
    assert sh(api, session, "cat kept") == "here"
    assert sh(api, clone, "cat kept") == "here"
    api.end(clone)
    assert await_state(api, clone, "terminated")["cause"] == "user"


def test_new_sessions_take_containers_from_the_pool(dockerd: Dockerd, tmp_path: Path) -> None:
    pool = {"ATOLL_POOL__SIZE": "2", "ATOLL_POOL__MAX_SIZE": "2"}
    given = QUICK | pool | drivers.settings(dockerd.url)
    with Server(tmp_path, **given).with_constants(QUICK_RETRIES) as server, calling(server) as api:
        eventually(lambda: node(api)["pool"] == {"python": 2}, LONG)
        ready = names(dockerd)
        session = api.create(memory="96Mi", env_vars={"A": "mine"})
        assert session["container_id"] in ready
        assert sh(api, session["id"], "echo $A") == "mine\n"
        limits = dockerd.inspect(container(api, session["id"]))["HostConfig"]
        assert limits["Memory"] == limits["MemorySwap"] == 96 * 2**20
        eventually(lambda: node(api)["pool"] == {"python": 2}, LONG)


# Limits


def test_out_of_memory_is_reported_as_the_cause(api: Api) -> None:
    session = api.create(memory="64Mi")["id"]
    result = api.run(session, "x = []\nwhile True: x.append(bytearray(b'x' * 2**22))", wait=60)

    assert (result["status"], result["cause"]) == ("failed", "oom"), result
    assert api.run(session, "print(1)")["stdout"] == "1\n"
    api.end(session)


def test_a_full_workspace_accepts_no_data_until_files_are_removed(api: Api) -> None:
    session = api.create(disk="16Mi")["id"]
    fill = (
        "for n in range(64):\n    with open(f'part-{n}', 'wb') as file: file.write(bytes(2**20))\n"
    )
    result = api.run(session, fill, timeout=60, wait=90)

    assert result["status"] == "failed"
    assert "No space left on device" in result["stderr"]
    sh(api, session, "rm part-*")
    assert api.run(session, "print(1)")["stdout"] == "1\n"
    api.end(session)
