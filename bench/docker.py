"""
`make bench-docker`: compares sessions in containers with sessions in bubblewrap and plain Docker.

The benchmark starts an engine of its own and uses one image and the same limits everywhere. Atoll
is used through its REST API with authentication and durable records, Docker through its command
line. Needs root and an otherwise idle machine. With few rounds, p99 is the slowest round.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers.docker import Dockerd
from tests.servers.images import PYTHON, make_archives

from bench import goals
from bench.__main__ import create, delete, run, wait_for_pool
from bench.measure import samples
from bench.report import Report, Way, parser
from bench.server import Server

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from bench.client import Client

LOCAL, DOCKER, GVISOR = "atoll, local", "atoll, docker", "atoll, gvisor"
RUNSC = "docker run --runtime=runsc"
CODE = "print(1)"
LIMITS = (
    "--network=none", "--memory=512m", "--memory-swap=512m", "--cpus=1", "--pids-limit=136",
    "--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only", "--user=1000:1000",
)  # fmt: skip
"""The limits of an instance of Atoll."""
POOL = 4


def arguments() -> argparse.Namespace:
    options = parser("docker", __doc__)
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--executions", type=int, default=200)
    options.add_argument("--at-once", type=int, default=20)
    options.add_argument("--idle", type=int, default=20, help="sessions whose memory is measured")
    return options.parse_args()


class Plain:
    """Docker without Atoll, through its command line."""

    def __init__(self, engine: Dockerd, runtime: str) -> None:
        self._host = engine.url
        self._runtime = runtime

    def call(self, *command: str) -> str:
        done = subprocess.run(
            ["docker", f"--host={self._host}", *command],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"docker {command[0]}: {done.stderr.strip()[-300:]}")
        return done.stdout.strip()

    def run(self, *options: str, command: tuple[str, ...] = ("python3", "-c", CODE)) -> str:
        runtime = f"--runtime={self._runtime}"
        return self.call("run", runtime, *LIMITS, *options, PYTHON, *command)

    def start(self) -> str:
        return self.run("--detach", command=("sleep", "86400"))

    def remove(self, *containers: str) -> None:
        self.call("rm", "--force", *containers)


class Setup:
    """An engine, and a server for each driver; two of them use the engine."""

    def __init__(self, stack: ExitStack, place: Path) -> None:
        self.engine = stack.enter_context(Dockerd(place))
        make_archives(place).load(self.engine)
        self.plain = Plain(self.engine, "runc")
        self.drivers: dict[str, dict[str, str]] = {LOCAL: {}, DOCKER: self._docker("runc")}
        self.runs = {"docker run": self.plain}
        if shutil.which("runsc") is not None:
            self.drivers[GVISOR] = self._docker("runsc")
            self.runs[RUNSC] = Plain(self.engine, "runsc")

    def _docker(self, runtime: str) -> dict[str, str]:
        return {
            "ATOLL_DRIVER": "docker",
            "ATOLL_DOCKER__URL": self.engine.url,
            "ATOLL_DOCKER__IMAGE": PYTHON,
            "ATOLL_DOCKER__RUNTIME": runtime,
        }

    def servers(self, stack: ExitStack, pool: int) -> dict[str, Server]:
        most = {"ATOLL_POOL__SIZE": str(pool), "ATOLL_POOL__MAX_SIZE": str(max(pool, 1))}
        return {
            name: stack.enter_context(Server(**most, **env)) for name, env in self.drivers.items()
        }


def cold(report: Report, setup: Setup, rounds: int) -> None:
    report.section("create a session without a pool, then print(1)")
    with ExitStack() as stack:
        ways = []
        for name, server in setup.servers(stack, 0).items():
            ways.append(Way(name, _first(server.client()), ours=True))
        ways += [Way(name, partial(plain.run, "--rm")) for name, plain in setup.runs.items()]
        found = report.turns(ways, rounds, sync=False)
    if GVISOR in found:
        report.goal(goals.GVISOR, found[GVISOR].p50 / found[RUNSC].p50)


def _first(client: Client) -> Callable[[], None]:
    def work() -> None:
        session = create(client)
        run(client, session, CODE)
        delete(client, session)

    return work


def warm(report: Report, setup: Setup, rounds: int) -> None:
    report.section("the same from a warm pool; docker exec uses a running container")
    with ExitStack() as stack:
        ways = []
        for name, server in setup.servers(stack, POOL).items():
            client = server.client()

            def ready(client: Client = client) -> None:
                wait_for_pool(client, "python", POOL)

            ways.append(Way(name, _first(client), ready, ours=True))
        container = setup.plain.start()
        stack.callback(setup.plain.remove, container)
        ways.append(_exec(setup.plain, container))
        report.turns(ways, rounds, sync=False)


def _exec(plain: Plain, container: str) -> Way:
    return Way("docker exec", lambda: plain.call("exec", container, "python3", "-c", CODE))


def executes(report: Report, setup: Setup, count: int) -> None:
    report.section("print(1) in a running session")
    with ExitStack() as stack:
        ways = []
        for name, server in setup.servers(stack, 0).items():
            client = server.client()
            session = create(client)
            run(client, session, CODE)

            def work(client: Client = client, session: str = session) -> None:
                run(client, session, CODE)

            ways.append(Way(name, work, ours=True))
        container = setup.plain.start()
        stack.callback(setup.plain.remove, container)
        ways.append(_exec(setup.plain, container))
        report.turns(ways, count, sync=False)


def together(report: Report, setup: Setup, count: int) -> None:
    report.section(f"{count} concurrent creates without a pool, then print(1) in each")
    found = {}

    def crowd(name: str, one: Callable[[int], object]) -> None:
        def timed(number: int) -> float:
            start = time.perf_counter()
            one(number)
            return (time.perf_counter() - start) * 1000

        with ThreadPoolExecutor(count) as threads:
            found[name] = samples(name, list(threads.map(timed, range(count))))

    with ExitStack() as stack:
        servers = setup.servers(stack, 0)
        for name, server in servers.items():
            crowd(name, partial(_one, server))
    for name, plain in setup.runs.items():
        crowd(name, partial(_run, plain))
    report.show(found, list(servers))
    if GVISOR in found:
        report.goal(goals.GVISOR_BURST, found[GVISOR].p50 / found[RUNSC].p50)


def _run(plain: Plain, number: int) -> None:
    plain.run("--rm")


def _one(server: Server, number: int) -> None:
    _first(server.client())()


def idle(report: Report, setup: Setup, count: int) -> None:
    report.section(f"memory of one idle session, the mean of {count}")
    figures = {}
    before = _used()
    containers = [setup.plain.start() for _ in range(count)]
    figures["docker run sleep"] = (_used() - before) / count
    setup.plain.remove(*containers)
    with ExitStack() as stack:
        for name, server in setup.servers(stack, 0).items():
            client = server.client()
            run(client, create(client), CODE)  # Creates what all sessions share.
            before = _used()
            made = [create(client) for _ in range(count)]
            figures[name] = (_used() - before) / count
            for session in made:
                delete(client, session)
    for name, size in figures.items():
        report.value(name, size / 2**20, "MiB", ours=name != "docker run sleep")


def _used() -> int:
    """
    Bytes of all processes, with their share of shared memory. Waits a moment, so that processes
    that are ending are not counted. The available memory of the machine varies too much.
    """
    time.sleep(2)
    total = 0
    for path in Path("/proc").glob("[0-9]*/smaps_rollup"):
        with suppress(OSError):  # It has ended, or is a kernel thread.
            for line in path.read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def main() -> None:
    given = arguments()
    with (
        Report("docker", given.json) as report,
        tempfile.TemporaryDirectory(prefix="atoll-bench-") as place,
        ExitStack() as stack,
    ):
        setup = Setup(stack, Path(place))
        if GVISOR not in setup.drivers:
            report.skip(GVISOR, "runsc is not installed")
        cold(report, setup, given.rounds)
        warm(report, setup, given.rounds)
        executes(report, setup, given.executions)
        together(report, setup, given.at_once)
        idle(report, setup, given.idle)


if __name__ == "__main__":
    main()
