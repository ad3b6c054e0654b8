"""
`make bench`: everything in one run, beside the floors, with ratios and an honest verdict.

Auth on, records durable, seccomp and control groups on as the host gives them; a raw keep-alive
client on loopback. Needs an otherwise idle machine to mean anything.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.interpreters import own_interpreter

from bench import floors
from bench.client import AsyncClient, Client
from bench.measure import Goal, Samples, samples, timed
from bench.server import Server

IDLE = 40
POOL = 20


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


def proportional_set(data_dir: Path) -> int:
    """PSS in bytes of all processes of the instances below this data directory, by their groups."""
    import json

    total = 0
    for handle in data_dir.glob("node/instances/*/handle.json"):
        root = int(json.loads(handle.read_text())["data"]["pid"])
        for pid in _tree(root):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def _tree(root: int) -> list[int]:
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def numpy_template(client: Client, python: Path) -> str | None:
    try:
        import numpy  # noqa: F401
    except ImportError:
        return None
    body = {"id": "numpy", "name": "numpy", "python": str(python), "preload": ["numpy"]}
    client.call("POST", "/api/v1/templates", body)
    return "numpy"


def main() -> None:
    rows: list[Samples] = []
    goals: list[Goal] = []

    def row(measured: Samples) -> Samples:
        print(measured.line(), flush=True)
        rows.append(measured)
        return measured

    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}\n\nfloors")
    spawn = row(floors.posix_spawn())
    wrapped = row(floors.python_under_bubblewrap())
    docker = [row(measured) for measured in floors.docker()]
    kernel = floors.ipykernel()
    if kernel is not None:
        row(kernel)

    print("\natoll")
    with ExitStack() as stack:
        python = stack.enter_context(own_interpreter())
        roots = os.pathsep.join([str(python.parent.parent), sys.base_prefix])
        settings = {"ATOLL_POOL__SIZE": str(POOL), "ATOLL_LOCAL__TEMPLATE_ROOTS": roots}
        server = stack.enter_context(Server(**settings))
        client = server.client()
        wait_for_pool(client, "python", POOL)
        session = create(client)
        printed = row(execute(client, session, "print(1)", "execute print(1) -> result"))
        goals.append(Goal("execute / posix_spawn", printed.p50 / spawn.p50, 2.5, "x"))
        if docker:
            ratio = docker[-1].p50 / printed.p50
            goals.append(Goal("docker exec / execute", ratio, 20, "x", at_least=True))
        if kernel is not None:
            ratio = kernel.p50 / printed.p50
            print(f"{'':<46} ipykernel / execute {ratio:.2f} x (no isolation there)")
        if template := numpy_template(client, python):
            other = create(client, template_id=template)
            code = "import numpy as np; print(np.arange(3).sum())"
            numpy = row(execute(client, other, code, "execute with numpy preloaded"))
            goals.append(Goal("numpy preloaded / print(1)", numpy.p50 / printed.p50, 2, "x"))
            delete(client, other)
        delete(client, session)

        pooled: list[float] = []
        for _ in range(5):
            wait_for_pool(client, "python", POOL)
            measured, made = creates(client, "", POOL - 1)
            pooled += measured.values
            for one in made:
                delete(client, one)
        taken = row(samples("create from the pool", pooled))
        goals.append(Goal("create from the pool, seen by the client", taken.p50, 1, "ms"))
        cold, made = creates(client, "create cold", 15, disk="512Mi")
        row(cold)
        goals.append(Goal("create cold / python under bwrap", cold.p50 / wrapped.p50, 1.5, "x"))
        for one in made:
            delete(client, one)
        wait_for_pool(client, "python", POOL)
        burst, good = at_once(server, 50)
        row(burst)
        goals.append(Goal("create, 50 at once: succeeded", good, 50, "", at_least=True))

        wait_for_pool(client, "python", POOL)
        sessions = [create(client) for _ in range(16)]
        wait_for_pool(client, "python", POOL)
        rate = asyncio.run(throughput(server, sessions, 8.0))
        goals.append(Goal("executions a second, 16 sessions", rate, 1000, "1/s", at_least=True))
        for one in sessions:
            delete(client, one)

    with Server(ATOLL_POOL__SIZE="0") as server:
        client = server.client()
        made = [create(client) for _ in range(IDLE)]
        fresh = proportional_set(server.data_dir) / IDLE
        print(f"{'idle session, not used yet':<46} {fresh / 2**20:.2f} MiB PSS")
        for one in made:
            client.call("POST", f"/api/v1/sessions/{one}/execute", {"code": "print(1)", "wait": 30})
        used = proportional_set(server.data_dir) / IDLE
        print(f"{'idle session, after an execution':<46} {used / 2**20:.2f} MiB PSS")
        goals.append(
            Goal("idle sessions per GiB, not used yet", 2**30 / fresh, 200, "", at_least=True)
        )
        goals.append(
            Goal("idle sessions per GiB, after an execution", 2**30 / used, 200, "", at_least=True)
        )

    print("\nasked for")
    for goal in goals:
        print(goal.line())
    if not docker:
        print("docker: no engine with a python image was reached; not measured")


if __name__ == "__main__":
    main()
