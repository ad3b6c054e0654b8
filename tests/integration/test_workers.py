"""`atoll serve --workers`: several processes that are one server."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from atoll.app import workers
from atoll.settings import Settings
from tests.e2e.api import Api, eventually
from tests.harness import Server
from tests.servers.redis import RedisServer

LONG = 60.0


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


def server(place: Path, redis: RedisServer, *arguments: str) -> Server:
    env = {
        "ATOLL_REDIS_URL": redis.url,
        "ATOLL_COORDINATION__PRESENCE_TTL": "4",
        "ATOLL_POOL__SIZE": "1",
        "ATOLL_POOL__MAX_SIZE": "1",
        "ATOLL_SESSION__DISK": str(16 * 2**20),
        "ATOLL_SHUTDOWN_TIMEOUT": "5",
    }
    return Server(place, "--workers", "2", *arguments, **env)


@pytest.fixture
def two(tmp_path: Path, bubblewrap: str, redis: RedisServer) -> Iterator[Server]:
    with server(tmp_path, redis) as running:
        yield running


def children(pid: int) -> list[int]:
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return sorted(found)


def workers_of(running: Server) -> list[int]:
    assert running.process is not None
    return children(running.process.pid)


def beneath(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (child, *beneath(child))]


def open_files(pid: int) -> set[str]:
    found = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                found.add(os.readlink(entry.path))
    return found


def test_a_dead_worker_is_replaced_and_no_execution_is_lost(two: Server) -> None:
    with two.client() as http:
        session = Api(http).create()["id"]
    before = workers_of(two)
    assert len(before) == 2
    for worker in before:
        os.kill(worker, signal.SIGKILL)
    eventually(lambda: not set(before) & set(workers_of(two)), LONG)
    eventually(lambda: len(workers_of(two)) == 2, LONG)

    with two.client() as http:
        assert Api(http).run(session, "print(1)")["stdout"] == "1\n"
    after = workers_of(two)
    assert two.stop() == 0
    assert not [pid for pid in after if Path(f"/proc/{pid}").exists()]


def test_workers_end_with_their_parent(two: Server) -> None:
    found = workers_of(two)
    two.stop(signal.SIGKILL)
    eventually(lambda: not [pid for pid in found if Path(f"/proc/{pid}").exists()], LONG)


def test_sigterm_before_the_workers_serve_ends_the_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        command = [sys.executable, "-m", "atoll.cli", "serve", "--port", "0", "--workers", "2"]
        env = {"ATOLL_REDIS_URL": url, "ATOLL_COORDINATION__READ_TIMEOUT": "600"}
        process = subprocess.Popen(
            [*command, "--data-dir", str(tmp_path)], env={**os.environ, **env}
        )
        try:
            silent.settimeout(LONG)
            with silent.accept()[0]:
                process.terminate()
                assert process.wait(LONG) == 0
        finally:
            process.kill()
            process.wait()
    eventually(lambda: not children(process.pid))


def test_code_inherits_no_open_files_of_the_server(two: Server) -> None:
    assert two.process is not None
    with two.client() as http:
        api = Api(http)
        session = api.create()["id"]
        running = api.submit(session, "import time; time.sleep(600)", timeout=600)
        api.await_status(running, "running")
        own = open_files(two.process.pid) - {"/dev/null"}
        pipes = {name for name in own if name.startswith(("pipe:", "socket:"))}
        # The listener, and what the workers see the end of the parent by.
        assert len(pipes) >= 2

        def inside() -> list[int]:
            return [pid for worker in workers_of(two) for pid in beneath(worker)]

        assert len(inside()) > 4
        # A child has them for the moment between its start and its program's.
        eventually(lambda: not [pid for pid in inside() if open_files(pid) & pipes])


def test_sessions_end_with_the_server_even_if_a_worker_has_just_died(
    tmp_path: Path, bubblewrap: str, redis: RedisServer
) -> None:
    with server(tmp_path, redis, "--stop-sessions") as running:
        with running.client() as http:
            Api(http).create()
        first = workers_of(running)[0]
        os.kill(first, signal.SIGKILL)
        eventually(lambda: first not in workers_of(running), LONG)
        assert running.stop() == 0
        with closing(sqlite3.connect(tmp_path / "atoll.db")) as connection:
            found = connection.execute("SELECT status, cause FROM sessions").fetchall()
    assert found == [("terminated", "shutdown")]


def test_a_worker_that_cannot_be_started_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_room() -> int:
        raise BlockingIOError

    found = workers.Workers(Settings(workers=2), lambda ready: None)
    worker = found._workers[0]
    worker.due = 0.0
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", no_room)
    found._start_again(worker)

    assert worker.due > 0
    assert worker.pid == 0
    assert len(os.listdir("/proc/self/fd")) == before
    for fd in found._life:
        os.close(fd)
