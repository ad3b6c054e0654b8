"""The warm pool: filled, used, never missed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests import drivers
from tests.e2e.api import V1, Api, eventually
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def pooled(bubblewrap: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    fixed = {"ATOLL_POOL__SIZE": "3", "ATOLL_POOL__MAX_SIZE": "3"}
    with Server(tmp_path_factory.mktemp("pooled"), **fixed) as server:
        yield server


@pytest.fixture
def full(pooled: Server) -> Iterator[Api]:
    """An API whose pool is full."""
    with pooled.client() as http:
        api = Api(http)
        eventually(lambda: api.pool() == {"python": 3}, 60)
        yield api


def created(api: Api) -> dict[str, int]:
    """How many sessions have started from the pool, and cold."""
    lines = api.http.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("atoll_sessions_created_total{")]
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in found}


def test_a_pool_is_filled_to_its_target_and_no_further(full: Api, pooled: Server) -> None:
    assert len(list((pooled.data_dir / "node" / "instances").iterdir())) == 3


@pytest.mark.slow
@pytest.mark.every_driver
def test_a_session_takes_a_ready_instance_and_applies_its_own_settings(full: Api) -> None:
    before = created(full)
    shown = full.create(env_vars={"A": "mine"}, memory="64Mi", cpu="0.5", max_processes=10)

    assert created(full) == {"pool": before["pool"] + 1, "cold": before["cold"]}
    code = "import os\nprint(os.environ['A'])"
    assert full.run(shown["id"], code)["stdout"] == "mine\n"
    over = full.run(shown["id"], "x = b'x' * (200 << 20)")
    assert (over["status"], over["cause"]) == ("failed", "oom")
    many = "import os, time\nfor _ in range(50):\n    if os.fork() == 0: time.sleep(100)"
    assert full.run(shown["id"], many, timeout=10)["status"] == "failed"
    full.end(shown["id"])


def test_a_session_with_another_disk_starts_cold(full: Api) -> None:
    before = created(full)
    shown = full.create(disk="32Mi")

    assert created(full) == {"pool": before["pool"], "cold": before["cold"] + 1}
    assert shown["resources"]["disk"] == "32Mi"
    full.end(shown["id"])


def test_creates_beyond_the_pool_start_cold_and_succeed(full: Api) -> None:
    before = created(full)
    sessions = [full.create()["id"] for _ in range(8)]
    after = created(full)

    assert after["pool"] + after["cold"] == before["pool"] + before["cold"] + 8
    assert after["pool"] - before["pool"] >= 3
    for session in sessions:
        assert full.run(session, "print(1)")["stdout"] == "1\n"
        full.end(session)


def test_a_taken_instance_is_replaced_in_the_pool(full: Api) -> None:
    session = full.create()["id"]

    eventually(lambda: full.pool() == {"python": 3})
    full.end(session)


@pytest.mark.slow
@pytest.mark.every_driver
def test_fifty_concurrent_creates_all_succeed(full: Api, pooled: Server) -> None:
    def create(number: int) -> str:
        with pooled.client() as http:
            api = Api(http)
            session = api.create(env_vars={"NUMBER": str(number)})["id"]
            code = "import os\nprint(os.environ['NUMBER'])"
            output = str(api.run(session, code)["stdout"])
            api.end(session)
            return output

    with ThreadPoolExecutor(50) as threads:
        outputs = list(threads.map(create, range(50)))

    assert outputs == [f"{number}\n" for number in range(50)]


def test_ready_instances_that_die_are_replaced(full: Api, pooled: Server) -> None:
    instances = pooled.data_dir / "node" / "instances"
    killed = set()
    for name in os.listdir(instances):
        try:
            os.kill(drivers.handle(pooled.data_dir, name)["child"], signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue  # Of a session that has ended: on its way out.
        killed.add(name)
    assert len(killed) >= 3
    eventually(lambda: not killed & set(os.listdir(instances)), 60)
    eventually(lambda: full.pool() == {"python": 3}, 60)
    before = created(full)
    session = full.create()["id"]

    assert created(full) == {**before, "pool": before["pool"] + 1}
    assert full.run(session, "print(1)")["stdout"] == "1\n"
    full.end(session)


def test_a_changed_template_replaces_the_instances_of_its_pool(full: Api, pooled: Server) -> None:
    instances = pooled.data_dir / "node" / "instances"

    def names() -> set[str]:
        return {path.name for path in instances.iterdir()}

    python = names()
    full.http.post(f"{V1}/templates", json={"id": "own", "name": "x", "pool_size": 2})
    try:
        eventually(lambda: full.pool() == {"python": 3, "own": 2})
        old = names() - python
        full.http.put(f"{V1}/templates/own", json={"name": "y", "pool_size": 2})
        eventually(lambda: len(names() - python) == 2 and not names() & old)
    finally:
        full.http.delete(f"{V1}/templates/own")

    eventually(lambda: names() <= python)


def test_creates_succeed_without_a_pool(bubblewrap: str, tmp_path: Path) -> None:
    with Server(tmp_path, ATOLL_POOL__SIZE="0") as server, server.client() as http:
        api = Api(http)
        assert api.run(api.create()["id"], "print(1)")["stdout"] == "1\n"
        assert created(api) == {"pool": 0, "cold": 1}
