"""Warm pools that follow demand, on real servers with short windows."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from atoll.reconcile import pool as refill
from atoll.service.pool import service
from tests.e2e.api import V1, Api, answer, eventually
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

BURST = 8
SILENCE = 40.0
"""More than any of these windows takes to be over, on a busy machine too."""


MEMORY_RESERVE = f"{refill.__name__}.MEMORY_RESERVE"
MAX_AGE = f"{refill.__name__}.MAX_AGE"
WINDOWS = (f"{service.__name__}.RATE_WINDOW", f"{refill.__name__}.RATE_WINDOW")
"""The same constant, where it is defined and where it is imported."""


@contextmanager
def serving(
    place: Path,
    *,
    window: float = 2,
    constants: Mapping[str, float] | None = None,
    **pool: object,
) -> Iterator[tuple[Server, Api]]:
    """A server with these settings and constants of pools, whose pool is at its minimum."""
    given = {"size": 1, **pool}
    env = {f"ATOLL_POOL__{name.upper()}": str(value) for name, value in given.items()}
    env["ATOLL_SESSION__DISK"] = str(16 * 2**20)
    replaced = {**dict.fromkeys(WINDOWS, window), **(constants or {})}
    with Server(place, **env).with_constants(replaced) as server, server.client() as http:
        api = Api(http)
        eventually(lambda: str(api.pool().get("python", 0)) == str(given["size"]))
        yield server, api


def burst(server: Server, many: int = BURST) -> None:
    """Create this number of sessions concurrently, all successfully, and end them."""

    def create_and_end(_: int) -> None:
        with server.client() as http:
            api = Api(http)
            api.end(api.create()["id"])

    with ThreadPoolExecutor(many) as threads:
        list(threads.map(create_and_end, range(many)))


def atoll(server: Server, *arguments: str) -> str:
    """What the command printed; it is to go well."""
    done = server.atoll(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def instances(server: Server) -> set[str]:
    return {path.name for path in (server.data_dir / "node" / "instances").iterdir()}


def test_a_burst_grows_a_pool_and_inactivity_shrinks_it(bubblewrap: str, tmp_path: Path) -> None:
    with serving(tmp_path, window=8) as (server, api):
        before = api.pools()["python"]
        assert (before["target"], before["minimum"], before["maximum"]) == (1, 1, 50)
        assert (before["hits"], before["misses"], before["rate_per_minute"]) == (0, 0, 0.0)
        burst(server)

        eventually(lambda: api.pools()["python"]["ready"] > BURST // 2)
        grown = api.pools()["python"]
        assert grown["hits"] + grown["misses"] == BURST
        assert grown["start_seconds"] > 0
        eventually(lambda: api.pools()["python"]["target"] == 1, SILENCE)
        eventually(lambda: api.pools()["python"]["ready"] == 1, SILENCE)
        eventually(lambda: len(instances(server)) == 1, SILENCE)
        assert api.pools()["python"]["rate_per_minute"] == 0.0


def test_the_next_burst_is_served_from_the_pool(bubblewrap: str, tmp_path: Path) -> None:
    with serving(tmp_path, window=600) as (server, api):
        burst(server)
        eventually(lambda: api.pools()["python"]["ready"] >= api.pools()["python"]["target"], 30)
        before = api.pools()["python"]
        made = [api.create()["id"] for _ in range(min(BURST, before["ready"]))]
        after = api.pools()["python"]

        assert after["hits"] - before["hits"] == len(made)
        assert after["misses"] == before["misses"]
        for session in made:
            assert api.run(session, "print(1)")["stdout"] == "1\n"
            api.end(session)


def test_the_memory_of_the_node_bounds_all_pools(bubblewrap: str, tmp_path: Path) -> None:
    with serving(tmp_path, window=600, memory_share=0.000001) as (server, api):
        answer(
            api.http.post(f"{V1}/templates", json={"id": "own", "name": "x", "pool_size": 2}), 201
        )
        eventually(lambda: api.pool() == {"python": 1, "own": 2})
        burst(server)

        eventually(lambda: api.pools()["python"]["limited_by"] == "memory_share")
        shown = api.pools()["python"]
        assert shown["wanted"] > shown["target"] == 1
        eventually(lambda: api.pool() == {"python": 1, "own": 2})


def test_a_node_without_free_memory_fills_no_pool(bubblewrap: str, tmp_path: Path) -> None:
    with serving(tmp_path, size=0, constants={MEMORY_RESERVE: 1}) as (_, api):
        answer(
            api.http.post(f"{V1}/templates", json={"id": "own", "name": "x", "pool_size": 2}), 201
        )
        eventually(lambda: "own" in api.pools())
        shown = api.pools()["own"]
        assert (shown["ready"], shown["target"], shown["limited_by"]) == (0, 2, "memory_free")
        session = api.create(template_id="own")["id"]
        assert api.run(session, "print(1)")["stdout"] == "1\n"
        assert api.pools()["own"]["misses"] == 1


def test_old_ready_instances_are_replaced(bubblewrap: str, tmp_path: Path) -> None:
    with serving(tmp_path, size=2, max_size=2, constants={MAX_AGE: 1}) as (server, api):
        first = instances(server)

        eventually(lambda: api.pool() == {"python": 2} and not instances(server) & first)
        session = api.create()["id"]
        assert api.run(session, "print(1)")["stdout"] == "1\n"


def test_a_changed_template_empties_a_pool_that_has_grown(bubblewrap: str, tmp_path: Path) -> None:
    with serving(tmp_path, size=0, window=600) as (server, api):
        fields = {"name": "x", "pool_size": 1, "pool_max": 4}
        answer(api.http.post(f"{V1}/templates", json={"id": "own", **fields}), 201)
        eventually(lambda: api.pools().get("own", {}).get("ready") == 1)
        made = [api.create(template_id="own")["id"] for _ in range(6)]
        for session in made:
            api.end(session)
        eventually(lambda: api.pools()["own"]["ready"] == 4)
        assert api.pools()["own"]["target"] == 4
        eventually(lambda: len(instances(server)) == 4)
        old = instances(server)
        answer(api.http.put(f"{V1}/templates/own", json={**fields, "pool_max": 2}))

        eventually(lambda: api.pools()["own"]["version"] == 2)
        eventually(lambda: not instances(server) & old and len(instances(server)) == 2)
        answer(api.http.put(f"{V1}/templates/own", json={"name": "x"}))
        eventually(lambda: "own" not in api.pools() and not instances(server))


def test_a_killed_server_leaves_no_more_instances_than_its_pool_may_have(
    bubblewrap: str, tmp_path: Path
) -> None:
    with serving(tmp_path, max_size=4, window=16) as (server, api):
        burst(server)
        eventually(lambda: api.pools()["python"]["ready"] == 4)
        server.stop(signal.SIGKILL)
        there = instances(server)
        server.start()
        # Those that it adopted, and no others, are what it begins with.
        assert instances(server) <= there
        with server.client() as http:
            api = Api(http)
            eventually(lambda: "python" in api.pools())
            assert 1 < api.pools()["python"]["ready"] <= 4
            eventually(lambda: api.pools()["python"]["target"] == 1, SILENCE)
            eventually(lambda: len(instances(server)) == 1, SILENCE)


def test_the_command_line_and_metrics_show_pools(bubblewrap: str, tmp_path: Path) -> None:
    with serving(tmp_path, max_size=1) as (server, api):
        api.end(api.create()["id"])
        listed: list[dict[str, Any]] = json.loads(atoll(server, "pools", "--json"))
        assert [pool["template_id"] for pool in listed] == ["python"]
        assert (listed[0]["hits"], listed[0]["maximum"]) == (1, 1)
        result = atoll(server, "pools")
        assert "TEMPLATE" in result
        assert "1/1" in result
        lines = api.http.get("/metrics").text.splitlines()
        assert 'atoll_pool_hits_total{template="python"} 1.0' in lines
        assert 'atoll_pool_misses_total{template="python"} 0.0' in lines
        assert 'atoll_pool_target{template="python"} 1.0' in lines
        assert any(line.startswith("atoll_pool_start_seconds{") for line in lines)
