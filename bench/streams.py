"""
`make bench-streams`: how soon and how fast output is heard, and many executions at once.

Beside the floor: a process of one's own with a pipe, which isolates nothing, records nothing and
can be heard by nobody else. Needs an otherwise idle machine to mean anything.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from bench.__main__ import create, delete, wait_for_pool
from bench.measure import Samples, samples, timed
from bench.report import Report, parser
from bench.server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.client import Client

FIRST = "print('here', flush=True)"
LINES = 20_000
MANY = f"for n in range({LINES}): print(n, flush=True)"
PAUSED = "import time\nfor n in range(2000):\n    print(n, flush=True)\n    time.sleep(0.0005)"
SESSIONS, EACH = 20, 5


class Stream:
    """One answer in mode stream, event by event."""

    def __init__(self, server: Server, client: Client, session: str, code: str) -> None:
        body = {"session_id": session, "code": code, "mode": "stream", "timeout_ms": 60_000}
        self._request = client.prepare("POST", "/api/v1/invocations", body)
        self._address = (server.host, server.port)

    def events(self) -> Iterator[bytes]:
        with socket.create_connection(self._address) as line:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.sendall(self._request)
            pending = b""
            while True:
                piece = line.recv(262_144)
                if not piece:
                    raise ConnectionError("the server closed the connection")
                pending += piece
                *events, pending = pending.split(b"\n\n")
                for event in events:
                    yield event
                    if b"event: result" in event:
                        return


def first_byte(stream: Stream) -> None:
    for event in stream.events():
        if b"event: stdout" in event:
            return
    raise RuntimeError("nothing was heard")


def first_byte_of_process() -> None:
    with subprocess.Popen([sys.executable, "-I", "-c", FIRST], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)


def heard(stream: Stream) -> tuple[int, float]:
    """How many events came, and in how many seconds from the first to the last."""
    count, first = 0, 0.0
    for event in stream.events():
        if b"event: stdout" in event:
            count += 1
            first = first or time.perf_counter()
    return count, time.perf_counter() - first


def read_from_process(code: str) -> float:
    with subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        start = time.perf_counter()
        for _ in process.stdout:
            pass
        return time.perf_counter() - start


def at_once(server: Server, sessions: list[str]) -> tuple[Samples, float, int]:
    """Executions of all sessions sent at the same moment: each one's time, all of it, failures."""

    def one(number: int) -> tuple[float, bool]:
        client = server.client()
        path = f"/api/v1/sessions/{sessions[number % SESSIONS]}/execute"
        begin = time.perf_counter()
        status, content = client.send(client.prepare("POST", path, {"code": FIRST, "wait": 60}))
        client.close()
        return (time.perf_counter() - begin) * 1000, status == 200 and b'"success"' in content

    start = time.perf_counter()
    with ThreadPoolExecutor(SESSIONS * EACH) as pool:
        told = list(pool.map(one, range(SESSIONS * EACH)))
    took = time.perf_counter() - start
    name = f"{SESSIONS * EACH} executions in {SESSIONS} sessions, each"
    return samples(name, [value for value, _ in told]), took, sum(not good for _, good in told)


def processes_at_once() -> float:
    command = [sys.executable, "-I", "-c", FIRST]

    def one(_: Any) -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    start = time.perf_counter()
    with ThreadPoolExecutor(SESSIONS) as pool:
        list(pool.map(one, range(SESSIONS * EACH)))
    return time.perf_counter() - start


def main() -> None:
    with (
        Report("streams", parser("streams", __doc__).parse_args().json) as report,
        Server(ATOLL_POOL__SIZE=str(SESSIONS)) as server,
    ):
        client = server.client()
        wait_for_pool(client, "python", SESSIONS)
        sessions = [create(client) for _ in range(SESSIONS)]
        first(report, Stream(server, client, sessions[0], FIRST))
        for name, code, lines in (
            ("as fast as it can", MANY, LINES),
            ("every half millisecond", PAUSED, 2000),
        ):
            report.section(f"{lines} lines, {name}")
            count, seconds = heard(Stream(server, client, sessions[0], code))
            pipe = report.value("a pipe", lines / read_from_process(code), "lines/s", ours=False)
            report.value("mode stream", lines / seconds, "lines/s", beside={"a pipe": pipe})
            report.value("mode stream", count / seconds, "events/s")
        report.section(f"{SESSIONS * EACH} executions at once")
        each, took, failed = at_once(server, sessions)
        if failed:
            raise RuntimeError(f"{failed} executions failed")
        report.add(each)
        name = f"as many new pythons, {SESSIONS} at a time"
        floor = report.value(name, processes_at_once() * 1000, "ms", ours=False)
        report.value("all of them", took * 1000, "ms", beside={name: floor})
        for session in sessions:
            delete(client, session)


def first(report: Report, stream: Stream) -> None:
    report.section("first byte of output")
    name = "a new python, by its pipe"
    floor = report.add(timed(name, first_byte_of_process, count=100), ours=False)
    report.add(timed("mode stream", lambda: first_byte(stream), count=500), floor)


if __name__ == "__main__":
    main()
