"""
`make bench-kubernetes`: compares sessions in a Kubernetes cluster with plain pods and exec.

The benchmark starts a cluster of its own, in a network namespace of its own: two nodes with real
pods on this machine, which they share with the control plane, the servers and the clients. Atoll is
used through its REST API with authentication and durable records. Plain pods are created, watched
and executed in over the API server, by a client that keeps its connections. Pools and idle sessions
by the thousand are simulated: their nodes exist in the API alone.

Needs root, Go to build the cluster once, and an otherwise idle machine.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers.kubernetes import background

from atoll.model.resources import Resources
from bench import goals, processes
from bench.__main__ import create, delete, run, wait_for_pool
from bench.client import AsyncClient
from bench.cluster_setup import ATOLL, PLAIN, BenchCluster
from bench.measure import samples
from bench.plain_pods import CODE, PlainPods
from bench.records_of_sessions import SessionRecords
from bench.report import Report, Way, parser
from bench.simulated_pods import SimulatedPods

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from bench.client import Client
    from bench.server import Server

PARTS = ("cold", "warm", "executes", "together", "claims", "idle")
POOL = 4
SETTLED = 2.0
"""Seconds after which kubelets have reported new pods; until then they change no limits."""
CLAIM_TURNS = 3
NODE = "kubernetes"
KEPT = {"timeout": 86_000}
RESOURCES = Resources(cpu=1.0, memory=512 << 20, disk=1 << 30, max_processes=128)
"""The default of a session."""
PATIENCE = 300.0
ROOM = {"ATOLL_KUBERNETES__CPUS": "100000", "ATOLL_KUBERNETES__MEMORY": str(1 << 50)}
"""Of simulated nodes."""


def arguments() -> argparse.Namespace:
    options = parser("kubernetes", __doc__)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--rounds", type=int, default=15, help="of what makes pods")
    options.add_argument("--executions", type=int, default=200)
    options.add_argument("--sessions", type=int, default=40, help="sessions created at once")
    options.add_argument("--claims", type=int, default=600, help="simulated ready instances")
    options.add_argument("--at-once", type=int, default=16, help="concurrent claims and writes")
    options.add_argument("--idle", type=int, default=2000, help="simulated idle sessions")
    options.add_argument("--records", type=int, default=10_000, help="stopped sessions")
    options.add_argument("--seconds", type=float, default=40, help="to watch an idle server")
    return options.parse_args()


class Setup:
    def __init__(self, stack: ExitStack, most: int) -> None:
        self.bench = BenchCluster(stack)
        self.plain = stack.enter_context(PlainPods(self.bench.kubeconfigs[PLAIN]))
        kubeconfig = self.bench.cluster.kubeconfig
        self.simulated = stack.enter_context(SimulatedPods(kubeconfig, most))


# Real pods


def cold(report: Report, setup: Setup, rounds: int) -> None:
    report.section("create without a pool, then print(1)")
    with setup.bench.server() as server:
        client, plain = server.client(), setup.plain
        made: list[str] = []
        pods: list[str] = []

        def session() -> None:
            made.append(create(client))
            run(client, made[-1], CODE)

        def remove() -> None:
            while made:
                delete(client, made.pop())
            plain.remove(*pods)
            pods.clear()

        made.append(_first(client))
        run(client, made[0], CODE)
        pods.append(plain.run())
        ways = [
            Way("atoll, session", session, remove, ours=True),
            Way("pod, watch, exec", lambda: pods.append(plain.run()), remove),
        ]
        found = report.turns(ways, rounds, sync=False)
        remove()
        count = setup.bench.requests(ATOLL)
        session()
        value = setup.bench.requests(ATOLL) - count
        report.value("API requests of a create, without those of attach", value, "")
        remove()
    report.goal(goals.KUBERNETES_COLD, found["atoll, session"].p50 / found["pod, watch, exec"].p50)


def warm(report: Report, setup: Setup, rounds: int) -> None:
    report.section(f"create from a warm pool of real pods, full for {SETTLED:g} s")
    values: dict[str, list[float]] = {}
    bigger = {"resources": {"memory": "600Mi"}}
    with setup.bench.server(ATOLL_POOL__SIZE=str(POOL), ATOLL_POOL__MAX_SIZE=str(POOL)) as server:
        client = server.client()

        def one(name: str, **body: object) -> None:
            wait_for_pool(client, "python", POOL, NODE)
            time.sleep(SETTLED)
            begin = time.perf_counter()
            session = create(client, **body)
            created = time.perf_counter()
            run(client, session, CODE)
            ended = time.perf_counter()
            delete(client, session)
            values.setdefault(name, []).append((created - begin) * 1000)
            values.setdefault(f"{name}, then print(1)", []).append((ended - begin) * 1000)

        for _ in range(rounds):
            one("create")
            one("create with more memory", **bigger)
    writes, _ = setup.plain.writes(50, 1)
    ours = list(values)
    found = {name: samples(name, taken) for name, taken in values.items()}
    write = "write of a config map"
    report.show({write: samples(write, writes), **found}, ours)


def executes(report: Report, setup: Setup, count: int) -> None:
    report.section("print(1) in a running session; exec uses a running pod")
    with ExitStack() as stack:
        ways = []
        for link in ("direct", "forward"):
            server = stack.enter_context(setup.bench.server(ATOLL_KUBERNETES__LINK=link))
            client = server.client()
            session = _first(client)
            run(client, session, CODE)

            def work(client: Client = client, session: str = session) -> None:
                run(client, session, CODE)

            ways.append(Way(f"atoll, {link} link", work, ours=True))
        pod = setup.plain.start()
        stack.callback(setup.plain.remove, pod)
        before = setup.bench.requests(ATOLL)
        ways.append(Way("exec over the API", lambda: setup.plain.execute(pod)))
        found = report.turns(ways, count, sync=False)
        asked = (setup.bench.requests(ATOLL) - before) / (2 * count)
        report.value("API requests of an execution", asked, "")
    ratio = found["exec over the API"].p50 / found["atoll, direct link"].p50
    report.goal(goals.KUBERNETES_EXEC, ratio)
    report.goal(goals.KUBERNETES_REQUESTS, asked)


def together(report: Report, setup: Setup, count: int) -> None:
    report.section(f"{count} creates at once without a pool, then print(1) in each")
    with setup.bench.server() as server:
        clients = [server.client() for _ in range(count)]
        delete(clients[0], _first(clients[0]))
        begin = time.perf_counter()

        def one(client: Client) -> tuple[float, str]:
            start = time.perf_counter()
            session = create(client)
            run(client, session, CODE)
            return (time.perf_counter() - start) * 1000, session

        with ThreadPoolExecutor(count) as threads:
            done = list(threads.map(one, clients))
        seconds = time.perf_counter() - begin
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda each: delete(server.client(), each[1]), done))
    values, plain_seconds = setup.plain.run_at_once(count)
    plain = samples("pod, watch, exec", values)
    ours = samples("atoll, session", [value for value, _ in done])
    report.show({ours.name: ours, plain.name: plain}, [ours.name])
    name = "pod, watch, exec: until all have run"
    report.value(name, plain_seconds, "s", ours=False)
    report.value("atoll: until all have run", seconds, "s", beside={name: plain_seconds})


# Simulated pods


def claims(report: Report, setup: Setup, count: int, at_once: int) -> None:
    report.section(f"{at_once} clients create sessions from a pool of {count} simulated pods")
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as place:
        one = {"ATOLL_POOL__SIZE": "1"}  # A template without a minimum has no pool.
        records = _first_records(setup, place, **one)
        pods = setup.simulated.create(count, records.cluster, RESOURCES)
        records.clear()
        records.add_ready(pods, "lost")
        pool = {**one, "ATOLL_POOL__MAX_SIZE": str(count), "ATOLL_POOL__MEMORY_SHARE": "1"}
        with setup.bench.server(place, **pool, **ROOM) as server:
            wait_for_pool(server.client(), "python", count, NODE)
            part = count // CLAIM_TURNS
            taken: list[float] = []
            rates: dict[str, list[float]] = {"claims": [], "writes": []}
            written: list[float] = []
            before, asked = processes.cpu_seconds(server.process.pid), setup.bench.requests(ATOLL)
            for _ in range(CLAIM_TURNS):
                values, seconds = setup.plain.writes(part, at_once)
                written += values
                rates["writes"].append(part / seconds)
                values, seconds = asyncio.run(_claim(server, part, at_once))
                taken += values
                rates["claims"].append(part / seconds)
            time.sleep(1)  # Pods are labelled in the background.
            cpu = (processes.cpu_seconds(server.process.pid) - before) / len(taken) * 1000
            asked = setup.bench.requests(ATOLL) - asked
            _kill(server)
        setup.simulated.remove_all()
    write = samples("write of a config map", written)
    claim = samples("create from the pool", taken)
    report.show({write.name: write, claim.name: claim}, [claim.name])
    best = {name: sorted(values)[len(values) // 2] for name, values in rates.items()}
    name = "writes of config maps"
    report.value(name, best["writes"], "/s", ours=False)
    report.value("creates from the pool", best["claims"], "/s", beside={name: best["writes"]})
    report.value("CPU of a create, in the server", cpu, "ms")
    report.value("API requests of a create, in the background", asked / len(taken), "")
    report.goal(goals.KUBERNETES_CLAIMS, best["claims"] / best["writes"])


async def _claim(server: Server, count: int, at_once: int) -> tuple[list[float], float]:
    clients = [await AsyncClient.connect(server.host, server.port) for _ in range(at_once)]
    request = server.client().prepare("POST", "/api/v1/sessions", {**KEPT})
    left = iter(range(count))
    values: list[float] = []

    async def one(client: AsyncClient) -> None:
        for _ in left:
            start = time.perf_counter()
            status = await client.send(request)
            if status != 201:
                raise RuntimeError(f"a create failed with status {status}")
            values.append((time.perf_counter() - start) * 1000)

    begin = time.perf_counter()
    await asyncio.gather(*map(one, clients))
    seconds = time.perf_counter() - begin
    for client in clients:
        client.close()
    return values, seconds


def idle(report: Report, setup: Setup, given: argparse.Namespace) -> None:
    seconds = given.seconds
    report.section(f"an idle server, watched for {seconds:g} s")
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as place:
        records = _first_records(setup, place)
        records.clear()
        with setup.bench.server(place) as server:
            empty = _watch(report, setup, server, "no sessions", seconds, {})
        records.add_stopped(given.records)
        with setup.bench.server(place) as server:
            _watch(report, setup, server, f"{given.records:,} stopped sessions", seconds, empty)
        records.clear()
        pods = setup.simulated.create(given.idle, records.cluster, RESOURCES)
        records.add_running(pods)
        begin = time.perf_counter()
        with setup.bench.server(place, **ROOM) as server:
            _until(lambda: len(setup.simulated.links) >= given.idle, "the links")
            at = f"{given.idle:,} idle sessions"
            linked = time.perf_counter() - begin
            report.value(f"{at}: from the start until all are connected", linked, "s")
            _watch(report, setup, server, at, seconds, empty)
            _kill(server)
        setup.simulated.remove_all()


def _watch(
    report: Report,
    setup: Setup,
    server: Server,
    at: str,
    seconds: float,
    beside: dict[str, float],
) -> dict[str, float]:
    """Show what a server uses, beside one without sessions."""
    pid = server.process.pid
    # After a start, pods get the labels of their sessions.
    asked = -1
    while asked != setup.bench.requests(ATOLL):
        asked = setup.bench.requests(ATOLL)
        time.sleep(3)
    cpu, asked = processes.cpu_seconds(pid), setup.bench.requests(ATOLL)
    time.sleep(seconds)
    found = {
        "CPU": (processes.cpu_seconds(pid) - cpu) / seconds * 100,
        "API requests": (setup.bench.requests(ATOLL) - asked) / seconds * 60,
        "memory": processes.proportional_set(pid) / 2**20,
    }
    units = {"CPU": "% of a core", "API requests": "/min", "memory": "MiB"}
    for name, value in found.items():
        other = {f"no sessions: {name}": beside[name]} if beside else {}
        report.value(f"{at}: {name}", value, units[name], beside=other)
    return found


def _first_records(setup: Setup, place: str, **env: str) -> SessionRecords:
    """The records of one real session, which has ended since."""
    with setup.bench.server(place, **env) as server:
        _first(server.client())
        return SessionRecords(Path(place) / "atoll.db")


def _first(client: Client) -> str:
    """The first session of a server, which has to find out first what the image has."""
    while True:
        try:
            return create(client, **KEPT)
        except RuntimeError as error:
            if "template_not_here" not in str(error):
                raise
            time.sleep(0.2)


def _kill(server: Server) -> None:
    """Otherwise it would stop all of its sessions."""
    server.process.kill()
    server.process.wait()


def _until(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited for {what}")
        time.sleep(0.05)


def main() -> None:
    given = arguments()
    background.run_with_cluster("bench.kubernetes")
    with Report("kubernetes", given.json) as report, ExitStack() as stack:
        setup = Setup(stack, max(given.idle, given.claims))
        if "cold" in given.parts:
            cold(report, setup, given.rounds)
        if "warm" in given.parts:
            warm(report, setup, given.rounds)
        if "executes" in given.parts:
            executes(report, setup, given.executions)
        if "together" in given.parts:
            together(report, setup, given.sessions)
        if "claims" in given.parts:
            claims(report, setup, given.claims, given.at_once)
        if "idle" in given.parts:
            idle(report, setup, given)


if __name__ == "__main__":
    main()
