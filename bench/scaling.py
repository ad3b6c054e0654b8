"""
`make bench-scaling`: what grows with the number of sessions and of records, and what must not.

Each curve begins with the smallest number, and the figures after it are shown beside that one.
Needs an otherwise idle machine, and for 1,000 sessions about 8 GiB of memory.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.settings import DatabaseSettings, SqliteSettings
from atoll.stores.sql.schema import Schema
from bench import processes
from bench.__main__ import create, creates, delete, execute, run, throughput, wait_for_pool
from bench.measure import Samples, timed
from bench.records import fill_file
from bench.report import Report, parser
from bench.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.client import Client

PARTS = ("throughput", "busy", "idle", "records")
EXECUTIONS = 300
BUSY = 15
CREATES = 20
NO_POOL = {"ATOLL_POOL__SIZE": "0", "ATOLL_POOL__MAX_SIZE": "1"}
KEPT = {"timeout": 86_000}


class Curve:
    """Figures of the same name at growing numbers, each beside the first one."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._first: dict[str, Samples] = {}
        self._values: dict[str, tuple[str, float]] = {}

    def add(self, name: str, at: str, measured: Samples) -> None:
        named = Samples(f"{name}, {at}", measured.values)
        first = self._first.setdefault(name, named)
        self._report.add(named, *([] if first is named else [first]))

    def value(self, name: str, at: str, value: float, unit: str) -> None:
        other, first = self._values.setdefault(name, (f"{name}, {at}", value))
        beside = {} if other == f"{name}, {at}" else {other: first}
        self._report.value(f"{name}, {at}", value, unit, beside=beside)


def throughputs(report: Report, counts: list[int], seconds: float) -> None:
    report.section("recorded executions a second")
    curve = Curve(report)
    with Server(**NO_POOL) as server:
        client = server.client()
        sessions: list[str] = []
        for count in counts:
            sessions += [create(client, **KEPT) for _ in range(count - len(sessions))]
            for session in sessions:
                run(client, session, "print(1)")
            before = used(server)
            begin = time.monotonic()
            rate = asyncio.run(throughput(server, sessions[:count], seconds))
            done = rate * (time.monotonic() - begin)
            curve.value("executions", f"{count} sessions", rate, "/s")
            curve.value(
                "CPU of an execution", f"{count} sessions", (used(server) - before) / done, "ms"
            )


def used(server: Server) -> float:
    """CPU time in ms of the server and all that it has started."""
    return sum(
        processes.cpu_seconds(pid) * 1000 + processes.of_ended_children(pid).cpu
        for pid in processes.tree(server.process.pid)
    )


def busy(report: Report) -> None:
    report.section(f"one session while {BUSY} others are busy")
    curve = Curve(report)
    with Server(**NO_POOL) as server:
        client = server.client()
        one, *others = [create(client, **KEPT) for _ in range(BUSY + 1)]
        for session in (one, *others):
            run(client, session, "print(1)")

        def measure(others_do: str) -> None:
            curve.add("execute", others_do, execute(client, one, "print(1)", "", EXECUTIONS))

        measure("others idle")
        with executing(server, others, "print(1)"):
            measure("others execute without a pause")
        with executing(server, others, "import time; time.sleep(0.1)"):
            measure("others sleep 0.1 s again and again")
        with executing(server, others, "while True: pass", seconds=EXECUTIONS):
            measure("others compute")


@contextmanager
def executing(server: Server, sessions: list[str], code: str, seconds: int = 30) -> Iterator[None]:
    """Execute the code in all of them, again and again, as long as the context lasts."""
    stop = threading.Event()

    def one(session: str) -> None:
        client = server.client()
        body = {"code": code, "wait": 300, "timeout": seconds}
        request = client.prepare("POST", f"/api/v1/sessions/{session}/execute", body)
        while not stop.is_set():
            client.send(request)

    threads = [threading.Thread(target=one, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    time.sleep(1)
    try:
        yield
    finally:
        stop.set()
        client = server.client()
        for thread, session in zip(threads, sessions, strict=True):
            delete(client, session)  # Ends what it executes.
            thread.join()


def idle(report: Report, counts: list[int], seconds: float) -> None:
    report.section(f"a server with idle sessions, watched for {seconds:g} s")
    curve = Curve(report)
    with ExitStack() as stack:
        server = stack.enter_context(Server(**NO_POOL))
        client = server.client()
        one = create(client, **KEPT)
        run(client, one, "print(1)")
        sessions: list[str] = []
        for count in counts:
            sessions += [create(client, **KEPT) for _ in range(count - len(sessions))]
            at = f"{count} sessions"
            time.sleep(5)  # What a create leaves to be done has been done.
            show_idle(curve, server, at, seconds)
            curve.add("execute", at, execute(client, one, "print(1)", "", EXECUTIONS))
            made, ids = creates(client, "", CREATES, **KEPT)
            curve.add("create", at, made)
            curve.add("get a session", at, requested(client, f"/api/v1/sessions/{one}"))
            curve.add("list one session", at, requested(client, "/api/v1/sessions?limit=1"))
            for session in ids:
                delete(client, session)


def show_idle(curve: Curve, server: Server, at: str, seconds: float) -> None:
    pid = server.process.pid
    instances = [each for each in processes.tree(pid) if each != pid]

    def cpu() -> tuple[float, float]:
        mine = processes.of_process(pid).cpu
        theirs = sum(processes.of_process(each).cpu for each in instances)
        return mine, theirs

    before = cpu()
    time.sleep(seconds)
    mine, theirs = (after - begin for after, begin in zip(cpu(), before, strict=True))
    curve.value("server, memory", at, processes.proportional_set(pid) / 2**20, "MiB")
    memory = sum(processes.proportional_set(each) for each in instances)
    curve.value("spawner and instances, memory", at, memory / 2**20, "MiB")
    curve.value("server, CPU", at, mine / seconds / 10, "% of a core")
    curve.value("spawner and instances, CPU", at, theirs / seconds / 10, "% of a core")


def records(report: Report, counts: list[int]) -> None:
    report.section("a server with records of executions in SQLite")
    curve = Curve(report)
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as place:
            path = Path(place) / "atoll.db"
            url = f"sqlite:///{path}"
            schema = Schema([url], sqlite=SqliteSettings(), database=DatabaseSettings())
            asyncio.run(schema.upgrade())
            fill_file(path, count)
            begin = time.perf_counter()
            with Server(data_dir=place, ATOLL_POOL__SIZE="2") as server:
                at = f"{count:,} records"
                curve.value("server start", at, (time.perf_counter() - begin) * 1000, "ms")
                requests(curve, at, server)


def requests(curve: Curve, at: str, server: Server) -> None:
    client = server.client()
    wait_for_pool(client, "python", 2)
    session = create(client, **KEPT)
    curve.add("execute", at, execute(client, session, "print(1)", "", EXECUTIONS))
    page = "/api/v1/executions?limit=50"
    curve.add("list executions", at, requested(client, page))
    cursor = client.call("GET", page)["next_cursor"]
    curve.add("list executions, page 2", at, requested(client, f"{page}&cursor={cursor}"))
    curve.add("list failed executions", at, requested(client, f"{page}&status=failed"))
    curve.value("server, memory", at, processes.proportional_set(server.process.pid) / 2**20, "MiB")


def requested(client: Client, path: str) -> Samples:
    return timed("", lambda: client.call("GET", path), count=200)


def main() -> None:
    options = parser("scaling", __doc__)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument("--at-once", nargs="+", type=int, default=[1, 2, 4, 16, 64])
    options.add_argument("--idle", nargs="+", type=int, default=[0, 100, 1000])
    options.add_argument("--records", nargs="+", type=int, default=[10_000, 1_000_000])
    options.add_argument("--seconds", type=float, default=10, help="of each point of a curve")
    given = options.parse_args()
    with Report("scaling", given.json) as report:
        if "throughput" in given.parts:
            throughputs(report, given.at_once, given.seconds)
        if "busy" in given.parts:
            busy(report)
        if "idle" in given.parts:
            idle(report, given.idle, given.seconds * 2)  # Two sweeps.
        if "records" in given.parts:
            records(report, given.records)


if __name__ == "__main__":
    main()
