"""Leftovers of a killed server on the machine, and their removal."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import preloaded
from tests.drivers import pausing
from tests.e2e.api import V1, Api, answer, eventually
from tests.e2e.test_recovery import groups_of
from tests.harness import Server
from tests.host_processes import below, living, of_instances, processes

if TYPE_CHECKING:
    from collections.abc import Iterator

SOON = {"ATOLL_LINK__UNATTENDED_GRACE": "1", "ATOLL_LINK__UNATTENDED_LIMIT": "2"}
LATE = {"ATOLL_LINK__UNATTENDED_GRACE": "3600", "ATOLL_LINK__UNATTENDED_LIMIT": "3600"}
POOL = {"ATOLL_POOL__SIZE": "1", "ATOLL_POOL__MAX_SIZE": "1"}
BUSY = """
import os, signal
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
if os.fork() == 0:
    os.setsid()
while True: pass
"""


class Leftovers:
    """What the host sees of a server's sessions."""

    def __init__(self, server: Server) -> None:
        assert server.process is not None
        self.data_dir = server.data_dir
        self.pids = below(server.process.pid)
        parents = {pid: parent for pid, (parent, _, _) in processes().items()}
        self.spawner = {pid for pid in self.pids if parents.get(pid) == server.process.pid}
        self.of_instances = of_instances(self.pids - self.spawner)
        self.instances = sorted(path.name for path in self.directory.iterdir())
        assert len(self.pids) > 3

    @property
    def directory(self) -> Path:
        return self.data_dir / "node" / "instances"

    def devices(self) -> list[str]:
        """Loop devices with images of the data directory."""
        found = []
        for file in Path("/sys/block").glob("loop*/loop/backing_file"):
            try:
                image = file.read_text()
            except OSError:
                continue  # It was detached at this moment.
            if image.startswith(f"{self.data_dir}/"):
                found.append(image)
        return found

    def groups(self) -> list[Path]:
        return [group for instance in self.instances for group in groups_of(instance)]

    def are_gone(self) -> bool:
        return not (self.pids & living()) and not self.devices() and not self.groups()


@pytest.fixture
def other(bubblewrap: str, tmp_path: Path) -> Iterator[Server]:
    """A server that is not to be disturbed."""
    directory = tmp_path / "other"
    directory.mkdir()
    with Server(directory, **LATE, **POOL) as server:
        yield server


Start = Callable[..., Server]


@pytest.fixture
def start(bubblewrap: str, tmp_path: Path) -> Iterator[Start]:
    """Starts a server; its leftovers are killed at the end of the test."""
    made: list[Server] = []

    def start(name: str, **env: str) -> Server:
        (tmp_path / name).mkdir()
        made.append(Server(tmp_path / name, **POOL, **env).start())
        return made[-1]

    yield start
    for server in made:
        if server.process is not None:
            server.stop(signal.SIGKILL)


def with_session(server: Server, *, busy: bool = False, **fields: Any) -> str:
    """One with a file; the pool is full again afterwards."""
    with server.client() as http:
        api = Api(http)
        session = str(api.create(**fields)["id"])
        api.put(session, "kept", b"here")
        if busy:
            api.await_status(api.submit(session, BUSY), "running")
        eventually(lambda: answer(http.get(f"{V1}/pools"))["items"][0]["ready"] == 1)
        return session


def remove(directory: Path) -> None:
    """Run as its owner, who cannot list all of it as an ordinary user."""
    (directory / "node" / "packages").chmod(0o700)
    shutil.rmtree(directory)


def gc(*arguments: str, **env: str) -> Any:
    done = preloaded.run("gc", "--json", *arguments, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.quick
def test_instances_end_without_a_server_and_the_session_continues_on_the_next(
    start: Start, tmp_path: Path
) -> None:
    server = start("one", **SOON)
    session = with_session(server, busy=True, timeout=1800, capacity=2)
    left = Leftovers(server)
    server.stop(signal.SIGKILL)
    eventually(left.are_gone)

    with server, server.client() as http:
        api = Api(http)
        assert api.run(session, "print(open('kept').read())")["stdout"] == "here\n"


def test_an_idle_session_is_kept_for_the_next_server(bubblewrap: str, tmp_path: Path) -> None:
    """It gets no requests, and the limit of its executor is far shorter than the wait."""
    directory = tmp_path / "one"
    directory.mkdir()
    with Server(directory, **POOL, **SOON) as server:
        session = with_session(server, timeout=1800)
        server.stop(signal.SIGKILL)
        server.start()
        with server.client() as http:
            api = Api(http)
            instance = api.get(session)["container_id"]
            assert instance is not None
            # More than once as long as it would wait.
            busy = with_session(server)
            api.run(busy, "import time; time.sleep(4)")
            handles = (directory / "node" / "instances").iterdir()
            (handle,) = [path for path in handles if path.name == instance]
            child = json.loads((handle / "handle.json").read_text())["data"]["child"]
            assert child in living()


@pausing
def test_a_paused_instance_of_a_removed_directory_ends(start: Start, tmp_path: Path) -> None:
    """Its executor cannot do it: it is frozen."""
    server = start("one", **(SOON | {"ATOLL_LINK__UNATTENDED_LIMIT": "20"}))
    session = with_session(server)
    with server.client() as http:
        answer(http.post(f"{V1}/sessions/{session}/pause", params={"wait": 20}))
    left = Leftovers(server)
    server.stop(signal.SIGKILL)
    assert left.of_instances <= living()
    remove(tmp_path / "one")
    eventually(left.are_gone)


GROUPS = pytest.mark.parametrize(
    "groups",
    [
        pytest.param({}, id="with control groups"),
        pytest.param({"ATOLL_LOCAL__CGROUP_ROOT": "/proc/self/fdinfo"}, id="without"),
    ],
)


@pytest.mark.quick
@GROUPS
def test_gc_removes_only_the_leftovers_of_a_removed_directory(
    other: Server, start: Start, tmp_path: Path, groups: dict[str, str]
) -> None:
    """Also when all were killed that would have done it."""
    untouched = with_session(other)
    server = start("one", **LATE, **groups)
    with_session(server, busy=True)
    left = Leftovers(server)
    for pid in left.spawner:
        os.kill(pid, signal.SIGKILL)
    server.stop(signal.SIGKILL)
    stays = Leftovers(other)

    assert gc(**groups) == []
    remove(tmp_path / "one")
    expected = [{"data_dir": str(tmp_path / "one"), "instances": 2, "containers": 0, "error": None}]
    assert gc("--dry-run", **groups) == expected
    assert not left.are_gone()
    assert gc(**groups) == expected
    eventually(left.are_gone)
    assert gc(**groups) == []
    assert stays.pids <= living()
    with other.client() as http:
        assert Api(http).run(untouched, "print(1)")["stdout"] == "1\n"


def test_every_start_removes_leftovers(start: Start, tmp_path: Path) -> None:
    server = start("one", **LATE)
    with_session(server)
    left = Leftovers(server)
    for pid in left.spawner:
        os.kill(pid, signal.SIGKILL)
    server.stop(signal.SIGKILL)
    remove(tmp_path / "one")
    (tmp_path / "two").mkdir()
    with Server(tmp_path / "two"):
        eventually(left.are_gone)


@pytest.mark.quick
def test_a_server_reports_what_it_leaves_running_and_gc_ends_it(
    start: Start, tmp_path: Path
) -> None:
    server = start("a b", **LATE)
    for _ in range(2):
        with_session(server)
    left = Leftovers(server)
    process = server.process
    assert process is not None
    assert process.stdout is not None
    process.send_signal(signal.SIGTERM)
    output = process.stdout.read()
    assert server.stop() == 0
    assert output.startswith("\n  curl") or "2 sessions keep running" in output
    assert f"atoll gc --stop-sessions --data-dir '{tmp_path}/a b'" in output

    gc("--stop-sessions", "--data-dir", str(tmp_path / "a b"))
    eventually(left.are_gone)
    server.start()
    assert server.process is not None
    assert server.process.stdout is not None
    server.process.send_signal(signal.SIGTERM)
    assert "running" not in server.process.stdout.read()
    server.stop()


def test_gc_creates_no_data_directory(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    done = preloaded.run("gc", "--json", "--stop-sessions", "--data-dir", str(missing))
    assert done.returncode == 1
    assert json.loads(done.stderr)["code"] == "data_dir_not_found"
    assert not missing.exists()
