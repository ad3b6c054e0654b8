"""
`make bench-backends`: what a request costs on each database, with and without Redis.

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
from typing import TYPE_CHECKING

from tests.servers.mariadb import MariaDB
from tests.servers.postgres import PostgreSQL
from tests.servers.redis import RedisServer

from bench import goals
from bench.__main__ import create, creates, delete, execute, throughput, wait_for_pool
from bench.report import Report, parser
from bench.server import Server

if TYPE_CHECKING:
    from bench.measure import Samples

POOL = 10
SESSIONS = 8
SECONDS = 5.0
EXECUTIONS = 500
ASKED = {"mariadb + redis": goals.MARIADB, "postgresql + redis": goals.POSTGRESQL}
CASES = (
    ("sqlite", False, 1),
    ("sqlite", True, 1),
    ("mariadb", True, 1),
    ("postgresql", True, 1),
    ("sqlite", True, 2),
    ("mariadb", True, 2),
    ("postgresql", True, 2),
)


def measure(
    report: Report, base: list[Samples], kind: str, redis: bool, workers: int
) -> tuple[str, list[Samples]]:
    """Execute and create, beside those of `base`."""
    name = f"{kind}{' + redis' if redis else ''}{f', {workers} workers' if workers > 1 else ''}"
    report.section(name)
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
        session = made[1][0]
        ran = execute(client, session, "print(1)", f"{name}: execute", count=EXECUTIONS)
        found = [ran, made[0]]
        for number, each in enumerate(found):
            report.add(each, *base[number : number + 1])
        for other in made[1]:
            delete(client, other)
        wait_for_pool(client, "python", POOL, node)
        sessions = [create(client) for _ in range(SESSIONS)]
        rate = asyncio.run(throughput(server, sessions, SECONDS))
        report.value(f"{name}: executions of {SESSIONS} sessions at once", rate, "/s")
        for other in sessions:
            delete(client, other)
    return name, found


def main() -> None:
    with Report("backends", parser("backends", __doc__).parse_args().json) as report:
        base: list[Samples] = []
        for case in CASES:
            name, found = measure(report, base, *case)
            base = base or found
            if name in ASKED:
                report.goal(ASKED[name], found[0].p50 / base[0].p50)


if __name__ == "__main__":
    main()
