"""
`make bench`: executions, creates and memory in one run, beside the floors, with a verdict.

Auth on, records durable, seccomp and control groups on as the host gives them; a raw keep-alive
client on loopback. Needs an otherwise idle machine to mean anything.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tests.interpreters import own_interpreter

from bench import floors, goals, processes
from bench.client import AsyncClient, Client
from bench.measure import Samples, samples, timed
from bench.report import Report, parser
from bench.server import Server

if TYPE_CHECKING:
    from pathlib import Path

IDLE = 40
POOL = 20
SESSIONS = 16
SECONDS = 8.0


def execute(client: Client, session: str, code: str, name: str, count: int = 1000) -> Samples:
    body = {"code": code, "wait": 30}
    request = client.prepare("POST", f"/api/v1/sessions/{session}/execute", body)

    def work() -> None:
        status, content = client.send(request)
        if status != 200 or b'"success"' not in content:
            raise RuntimeError(content.decode())

    return timed(name, work, count=count, warm=50)


def create(client: Client, **body: Any) -> str:
    return str(client.call("POST", "/api/v1/sessions", {"timeout": 3600, **body})["id"])


def delete(client: Client, session: str) -> None:
    client.call("DELETE", f"/api/v1/sessions/{session}")


def run(client: Client, session: str, code: str) -> None:
    """Code that has to succeed."""
    path = f"/api/v1/sessions/{session}/execute"
    status, content = client.send(client.prepare("POST", path, {"code": code, "wait": 300}))
    if status != 200 or b'"success"' not in content:
        raise RuntimeError(content.decode()[:500])


def wait_for_pool(client: Client, template: str, size: int, node: str = "local") -> None:
    deadline = time.monotonic() + 120
    while client.call("GET", f"/api/v1/runtimes/{node}/metrics")["pool"].get(template, 0) < size:
        if time.monotonic() > deadline:
            raise RuntimeError("the pool does not fill")
        time.sleep(0.05)


def creates(client: Client, name: str, count: int, **body: Any) -> tuple[Samples, list[str]]:
    values, made = [], []
    for _ in range(count):
        start = time.perf_counter()
        made.append(create(client, **body))
        values.append((time.perf_counter() - start) * 1000)
    return samples(name, values), made


def at_once(server: Server, count: int) -> tuple[Samples, int]:
    """So many creates at the same moment, each on a connection of its own; how many succeeded."""

    def one(_: int) -> tuple[float, str]:
        client = server.client()
        start = time.perf_counter()
        try:
            return (time.perf_counter() - start) * 1000, create(client)
        finally:
            client.close()

    def measured(number: int) -> tuple[float, str | None]:
        start = time.perf_counter()
        try:
            _, made = one(number)
        except (RuntimeError, OSError):
            made = ""
        return (time.perf_counter() - start) * 1000, made or None

    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(measured, range(count)))
    client = server.client()
    for _, made in results:
        if made:
            delete(client, made)
    client.close()
    good = sum(1 for _, made in results if made)
    return samples(f"create, {count} at once", [value for value, _ in results]), good


async def throughput(server: Server, sessions: list[str], seconds: float) -> float:
    """Recorded executions a second over one connection a session."""
    stop = time.monotonic() + seconds

    async def one(session: str) -> int:
        client = await AsyncClient.connect(server.host, server.port)
        body = {"code": "print(1)", "wait": 30}
        request = server.client().prepare("POST", f"/api/v1/sessions/{session}/execute", body)
        done = 0
        while time.monotonic() < stop:
            if await client.send(request) != 200:
                raise RuntimeError("an execution failed")
            done += 1
        client.close()
        return done

    start = time.monotonic()
    done = await asyncio.gather(*(one(session) for session in sessions))
    return sum(done) / (time.monotonic() - start)


def instance_memory(data_dir: Path) -> int:
    """PSS in bytes of all processes of the instances below this data directory."""
    handles = data_dir.glob("node/instances/*/handle.json")
    roots = [int(json.loads(handle.read_text())["data"]["pid"]) for handle in handles]
    return sum(processes.proportional_set(pid) for root in roots for pid in processes.tree(root))


def numpy_template(client: Client, python: Path) -> str | None:
    try:
        import numpy  # noqa: F401
    except ImportError:
        return None
    body = {"id": "numpy", "name": "numpy", "python": str(python), "preload": ["numpy"]}
    client.call("POST", "/api/v1/templates", body)
    return "numpy"


def main() -> None:
    with Report("main", parser("main", __doc__).parse_args().json) as report:
        report.section("floors")
        spawn = report.add(floors.posix_spawn(), ours=False)
        wrapped = report.add(floors.python_under_bubblewrap(), ours=False)
        with ExitStack() as stack:
            python = stack.enter_context(own_interpreter())
            roots = os.pathsep.join([str(python.parent.parent), sys.base_prefix])
            settings = {"ATOLL_POOL__SIZE": str(POOL), "ATOLL_LOCAL__TEMPLATE_ROOTS": roots}
            server = stack.enter_context(Server(**settings))
            executions(report, server, python, spawn)
            sessions(report, server, wrapped)
            report.section(f"executions of {SESSIONS} sessions at once")
            client = server.client()
            wait_for_pool(client, "python", POOL)
            made = [create(client) for _ in range(SESSIONS)]
            wait_for_pool(client, "python", POOL)
            rate = asyncio.run(throughput(server, made, SECONDS))
            report.goal(goals.THROUGHPUT, report.value("recorded executions", rate, "/s"))
        memory(report)


def executions(report: Report, server: Server, python: Path, spawn: Samples) -> None:
    report.section("execute")
    client = server.client()
    wait_for_pool(client, "python", POOL)
    session = create(client)
    printed = report.add(execute(client, session, "print(1)", "execute print(1) -> result"), spawn)
    report.goal(goals.EXECUTE, printed.p50 / spawn.p50)
    if template := numpy_template(client, python):
        other = create(client, template_id=template)
        code = "import numpy as np; print(np.arange(3).sum())"
        numpy = execute(client, other, code, "execute with numpy preloaded")
        report.add(numpy, printed)
        report.goal(goals.NUMPY, numpy.p50 / printed.p50)
        delete(client, other)
    else:
        report.skip("execute with numpy preloaded", "numpy is not installed")
    delete(client, session)


def sessions(report: Report, server: Server, wrapped: Samples) -> None:
    report.section("create")
    client = server.client()
    pooled: list[float] = []
    for _ in range(5):
        wait_for_pool(client, "python", POOL)
        measured, made = creates(client, "", POOL - 1)
        pooled += measured.values
        for one in made:
            delete(client, one)
    taken = report.add(samples("create from the pool", pooled))
    report.goal(goals.CREATE, taken.p50)
    report.goal(goals.CREATE_P99, taken.p99)
    cold, made = creates(client, "create without a pool", 15, disk="512Mi")
    report.add(cold, wrapped)
    report.goal(goals.COLD, cold.p50 / wrapped.p50)
    for one in made:
        delete(client, one)
    wait_for_pool(client, "python", POOL)
    burst, good = at_once(server, 50)
    report.add(burst)
    report.goal(goals.BURST, good)
    report.goal(goals.BURST_P99, burst.p99)


def memory(report: Report) -> None:
    report.section("memory of an idle session, the mean of many")
    with Server(ATOLL_POOL__SIZE="0") as server:
        client = server.client()
        made = [create(client) for _ in range(IDLE)]
        fresh = instance_memory(server.data_dir) / IDLE
        report.value("before its first use", fresh / 2**20, "MiB")
        for one in made:
            run(client, one, "print(1)")
        used = instance_memory(server.data_dir) / IDLE
        report.value("after an execution", used / 2**20, "MiB")
    report.goal(goals.IDLE, 2**30 / fresh)
    report.goal(goals.IDLE_USED, 2**30 / used)


if __name__ == "__main__":
    main()
