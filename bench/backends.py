"""
`python -m bench.backends`: what a request costs on each database, with and without Redis.

One run, one machine, side by side: execute and create as a client sees them, executions a second
over 8 sessions, with one server and with workers. The database servers and Redis are private ones
on loopback with the tests' settings (no fsync).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.servers.mariadb import MariaDB
from tests.servers.postgres import PostgreSQL
from tests.servers.redis import RedisServer

from bench.__main__ import create, creates, delete, execute, throughput, wait_for_pool
from bench.server import Server

POOL = 10
SESSIONS = 8
SECONDS = 5.0
EXECUTIONS = 500
CASES = (
    ("sqlite", False, 1),
    ("sqlite", True, 1),
    ("mariadb", True, 1),
    ("postgresql", True, 1),
    ("sqlite", True, 2),
    ("mariadb", True, 2),
    ("postgresql", True, 2),
)


def measure(kind: str, redis: bool, workers: int) -> tuple[str, float, float, float]:
    """Name, p50 of execute and of create, executions a second."""
    name = f"{kind}{' + redis' if redis else ''}{f', {workers} workers' if workers > 1 else ''}"
    env = {"ATOLL_POOL__SIZE": str(POOL), "ATOLL_WORKERS": str(workers)}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-bench-")))
        place.chmod(0o755)  # PostgreSQL runs as another user.
        if kind != "sqlite":
            database = {"mariadb": MariaDB, "postgresql": PostgreSQL}[kind](place)
            env["ATOLL_DATABASE_URL"] = stack.enter_context(database).url
            command = [sys.executable, "-m", "atoll.cli", "db", "upgrade"]
            subprocess.run(command, env={**os.environ, **env}, check=True, capture_output=True)
        if redis:
            (place / "redis").mkdir()
            env["ATOLL_REDIS_URL"] = stack.enter_context(RedisServer(place / "redis")).url
        server = stack.enter_context(Server(**env))
        client = server.client()
        node = client.call("GET", "/api/v1/runtimes")["items"][0]["id"]
        wait_for_pool(client, "python", POOL, node)
        made = creates(client, f"{name}: create", POOL - 2)
        print(made[0].line(), flush=True)
        session = made[1][0]
        ran = execute(client, session, "print(1)", f"{name}: execute", count=EXECUTIONS)
        print(ran.line(), flush=True)
        for other in made[1]:
            delete(client, other)
        wait_for_pool(client, "python", POOL, node)
        sessions = [create(client) for _ in range(SESSIONS)]
        rate = asyncio.run(throughput(server, sessions, SECONDS))
        print(f"{name + f': {SESSIONS} sessions':<46} {rate:9.0f} executions/s", flush=True)
        for other in sessions:
            delete(client, other)
    return name, ran.p50, made[0].p50, rate


def main() -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}\n")
    found = [measure(*case) for case in CASES]
    _, execute_ms, create_ms, per_second = found[0]
    print(f"\n{'beside sqlite without redis':<34} {'execute':>9} {'create':>9} {'a second':>9}")
    for name, ran, made, rate in found:
        ratios = (ran / execute_ms, made / create_ms, rate / per_second)
        print(f"{name:<34} " + " ".join(f"{ratio:8.2f}x" for ratio in ratios))


if __name__ == "__main__":
    main()
