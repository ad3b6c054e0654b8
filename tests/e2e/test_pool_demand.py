"""Warm pools that follow demand, on real servers."""

from __future__ import annotations

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.e2e.api import V1, Api, answer, eventually
from tests.harness import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BURST = 8


@contextmanager
def serving(place: Path, **pool: object) -> Iterator[tuple[Server, Api]]:
    """A server with these settings of pools, whose pool is at its minimum."""
    given = {"size": 1, **pool}
    env = {f"ATOLL_POOL__{name.upper()}": str(value) for name, value in given.items()}
    env["ATOLL_SESSION__DISK"] = str(16 * 2**20)
    with Server(place, **env) as server, server.client() as http:
        api = Api(http)
        eventually(lambda: str(api.pool().get("python", 0)) == str(given["size"]))
        yield server, api


def burst(server: Server, many: int = BURST) -> None:
    """So many creates at once, all of which succeed, and their end."""

    def one(_: int) -> None:
        with server.client() as http:
            api = Api(http)
            api.end(api.create()["id"])

    with ThreadPoolExecutor(many) as threads:
        list(threads.map(one, range(many)))


def atoll(server: Server, *words: str) -> str:
    """What the command printed; it is to go well."""
    done = server.atoll(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def instances(server: Server) -> set[str]:
    return {path.name for path in (server.data_dir / "node" / "instances").iterdir()}


def test_a_burst_makes_a_pool_grow(bubblewrap: str, tmp_path: Path) -> None:
    with serving(tmp_path) as (server, api):
        before = api.pools()["python"]
        assert (before["target"], before["minimum"], before["maximum"]) == (1, 1, 50)
        assert (before["hits"], before["misses"], before["rate_per_minute"]) == (0, 0, 0.0)
        burst(server)

        eventually(lambda: api.pools()["python"]["ready"] > BURST // 2)
        grown = api.pools()["python"]
        assert grown["hits"] + grown["misses"] == BURST
        assert grown["start_seconds"] > 0


def test_the_next_burst_is_served_from_the_pool(bubblewrap: str, tmp_path: Path) -> None:
    with serving(tmp_path) as (server, api):
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


def test_the_nodes_memory_bounds_all_pools(bubblewrap: str, tmp_path: Path) -> None:
    with serving(tmp_path, memory_share=0.000001) as (server, api):
        answer(
            api.http.post(f"{V1}/templates", json={"id": "own", "name": "x", "pool_size": 2}), 201
        )
        eventually(lambda: api.pool() == {"python": 1, "own": 2})
        burst(server)

        eventually(lambda: api.pools()["python"]["limited_by"] == "memory_share")
        shown = api.pools()["python"]
        assert shown["wanted"] > shown["target"] == 1
        eventually(lambda: api.pool() == {"python": 1, "own": 2})


def test_a_changed_template_empties_a_pool_that_has_grown(bubblewrap: str, tmp_path: Path) -> None:
    with serving(tmp_path, size=0) as (server, api):
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


def test_a_killed_server_leaves_no_more_than_its_pool_may_have(
    bubblewrap: str, tmp_path: Path
) -> None:
    with serving(tmp_path, max_size=4) as (server, api):
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


def test_pools_are_told_by_command_line_and_metrics(bubblewrap: str, tmp_path: Path) -> None:
    with serving(tmp_path, max_size=1) as (server, api):
        api.end(api.create()["id"])
        listed: list[dict[str, Any]] = json.loads(atoll(server, "pools", "--json"))
        assert [pool["template_id"] for pool in listed] == ["python"]
        assert (listed[0]["hits"], listed[0]["maximum"]) == (1, 1)
        told = atoll(server, "pools")
        assert "TEMPLATE" in told
        assert "1/1" in told
        lines = api.http.get("/metrics").text.splitlines()
        assert 'atoll_pool_hits_total{template="python"} 1.0' in lines
        assert 'atoll_pool_misses_total{template="python"} 0.0' in lines
        assert 'atoll_pool_target{template="python"} 1.0' in lines
        assert any(line.startswith("atoll_pool_start_seconds{") for line in lines)
