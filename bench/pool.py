"""
`make bench-pool`: creates in bursts and at a steady rate, on a pool of a fixed size and on one that
follows demand, in one run.

Both keep as many instances ready while nobody asks (`--size`). A burst comes twice: the first time
nobody could know of it, the second time the pool may have learned. Latency is what the client sees,
on a connection of its own; a create that fails is counted, not timed. At a steady rate creates
begin when they are due, whether those before have ended or not.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.__main__ import create, delete
from bench.measure import Samples, samples
from bench.server import Server

if TYPE_CHECKING:
    from bench.client import Client

PATIENCE = 120.0


@dataclass(frozen=True)
class Row:
    pool: str
    name: str
    asked: int
    measured: Samples
    hits: int
    """Creates that found a ready instance."""

    @property
    def succeeded(self) -> int:
        return len(self.measured.values)

    def line(self) -> str:
        return (
            f"{self.pool:<10} {self.name:<28} {self.succeeded:>4} of {self.asked:<4} "
            f"p50 {self.measured.p50:9.2f}   p95 {self.measured.p95:9.2f} ms   "
            f"from the pool {self.hits / self.asked:4.0%}"
        )

    def told(self) -> dict[str, Any]:
        return {
            "pool": self.pool,
            "name": self.name,
            "asked": self.asked,
            "succeeded": self.succeeded,
            "p50_ms": self.measured.p50,
            "p95_ms": self.measured.p95,
            "from_pool": self.hits,
        }


class Subject:
    def __init__(self, name: str, server: Server) -> None:
        self._name = name
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

    def at_once(self, name: str, many: int) -> Row:
        return self._measure(name, [0.0] * many)

    def steadily(self, rate: float, seconds: float) -> Row:
        due = [number / rate for number in range(int(rate * seconds))]
        return self._measure(f"{rate:g} a second", due)

    def _measure(self, name: str, due: list[float]) -> Row:
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
        return Row(self._name, name, len(due), samples(name, values), hits)


def measure(name: str, arguments: argparse.Namespace, **env: str) -> list[Row]:
    rows: list[Row] = []
    with Server(ATOLL_POOL__SIZE=str(arguments.size), **env) as server:
        subject = Subject(name, server)
        for which in ("first burst", "second burst"):
            subject.settled()
            rows.append(subject.at_once(f"{arguments.burst} at once, {which}", arguments.burst))
            print(rows[-1].line(), flush=True)
    with Server(ATOLL_POOL__SIZE=str(arguments.size), **env) as server:
        subject = Subject(name, server)
        subject.settled()
        rows.append(subject.steadily(arguments.rate, arguments.seconds))
        print(rows[-1].line(), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.pool", description=__doc__)
    parser.add_argument("--burst", type=int, default=50, help="creates at once")
    parser.add_argument("--rate", type=float, default=5.0, help="creates a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of that rate")
    parser.add_argument("--size", type=int, default=2, help="ready instances at least")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}\n")
    rows = measure("fixed", arguments, ATOLL_POOL__MAX_SIZE=str(arguments.size))
    rows += measure("follows", arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([row.told() for row in rows], indent=2) + "\n")
    if any(row.succeeded < row.asked for row in rows):
        sys.exit("not all creates succeeded")


if __name__ == "__main__":
    main()
