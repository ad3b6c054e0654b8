"""
`make bench-pool`: creates in bursts and at a steady rate, on a pool of a fixed size and on one that
follows demand, in one run.

Both keep as many instances ready while nobody asks (`--size`). A burst comes twice: the first time
nobody could know of it, the second time the pool may have learned. Latency is what the client sees,
on a connection of its own; a create that fails is counted, not timed. At a steady rate creates
begin when they are due, whether those before have ended or not.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from bench.__main__ import create, delete
from bench.measure import samples
from bench.report import Report, parser
from bench.server import Server

if TYPE_CHECKING:
    import argparse

    from bench.client import Client

PATIENCE = 120.0


class Subject:
    def __init__(self, report: Report, server: Server) -> None:
        self._report = report
        self._server = server
        self._client = server.client()

    def state(self) -> dict[str, Any]:
        items = self._client.call("GET", "/api/v1/pools")["items"]
        found: dict[str, Any] = next(item for item in items if item["template_id"] == "python")
        return found

    def settled(self) -> None:
        """Until as many are ready as are to be, at this moment."""
        deadline = time.monotonic() + PATIENCE
        while (state := self.state())["ready"] < state["target"] or state["starting"]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the pool does not settle: {state}")
            time.sleep(0.05)

    def at_once(self, name: str, many: int) -> None:
        self._measure(name, [0.0] * many)

    def steadily(self, rate: float, seconds: float) -> None:
        due = [number / rate for number in range(int(rate * seconds))]
        self._measure(f"{rate:g} a second", due)

    def _measure(self, name: str, due: list[float]) -> None:
        clients = [self._server.client() for _ in due]
        before = self.state()["hits"]
        begin = time.perf_counter() + 0.1

        def one(client: Client, at: float) -> tuple[float, str | None]:
            time.sleep(max(0.0, begin + at - time.perf_counter()))
            start = time.perf_counter()
            try:
                made = create(client)
            except (RuntimeError, OSError):
                return 0.0, None
            return (time.perf_counter() - start) * 1000, made

        with ThreadPoolExecutor(len(due)) as threads:
            results = list(threads.map(one, clients, due))
        hits = self.state()["hits"] - before
        for client in clients:
            client.close()
        for _, made in results:
            if made is not None:
                delete(self._client, made)
        values = [value for value, made in results if made is not None]
        self._report.add(samples(name, values))
        self._report.value(f"{name}: found a ready instance", hits / len(due) * 100, "%")
        if len(values) < len(due):
            raise RuntimeError(f"{len(due) - len(values)} of {len(due)} creates failed")


def measure(report: Report, name: str, given: argparse.Namespace, **env: str) -> None:
    report.section(f"a pool that {name}")
    with Server(ATOLL_POOL__SIZE=str(given.size), **env) as server:
        subject = Subject(report, server)
        for which in ("first burst", "second burst"):
            subject.settled()
            subject.at_once(f"{given.burst} at once, {which}", given.burst)
    with Server(ATOLL_POOL__SIZE=str(given.size), **env) as server:
        subject = Subject(report, server)
        subject.settled()
        subject.steadily(given.rate, given.seconds)


def main() -> None:
    options = parser("pool", __doc__)
    options.add_argument("--burst", type=int, default=50, help="creates at once")
    options.add_argument("--rate", type=float, default=5.0, help="creates a second")
    options.add_argument("--seconds", type=float, default=20.0, help="of that rate")
    options.add_argument("--size", type=int, default=2, help="ready instances at least")
    given = options.parse_args()
    with Report("pool", given.json) as report:
        measure(report, "has a fixed size", given, ATOLL_POOL__MAX_SIZE=str(given.size))
        measure(report, "follows demand", given)


if __name__ == "__main__":
    main()
