"""
The database goes away under load and comes back: what was accepted ends once, nobody is told a
wrong thing, and the control plane needs no restart.

The servers are real ones, killed, or stopped in their tracks; the settings only shorten how long
Atoll waits for them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from atoll.reconcile.executions import STRAY
from atoll.settings import DatabaseSettings
from atoll.stores.sql.connect import make_engine
from tests.e2e.api import V1, Api, answer, eventually, problem, until
from tests.harness import Server
from tests.servers.mariadb import MariaDB
from tests.servers.postgres import PostgreSQL
from tests.servers.process import DatabaseServer
from tests.servers.redis import RedisServer

from .proxy import Proxy

SETTINGS = {
    "ATOLL_DATABASE__CONNECT_TIMEOUT": "1",
    "ATOLL_DATABASE__OPERATION_TIMEOUT": "3",
    "ATOLL_DATABASE__RETRY_BACKOFF": "0.5",
    "ATOLL_COORDINATION__PRESENCE_TTL": "3",
    "ATOLL_POOL__SIZE": "2",
    # Else each workspace is an image, which is slow to make and says nothing here.
    "ATOLL_SESSION__DISK": str(16 * 2**20),
}
KINDS = [pytest.param(MariaDB, id="mariadb"), pytest.param(PostgreSQL, id="postgresql")]
BOUNDED = 30.0
"""Seconds in which every request is answered, whatever the database does."""
RECOVERED = 60.0
"""Seconds in which all is as before once the database is back."""
UNFINISHED = "status IN ('pending', 'running')"


def ask(database: DatabaseServer, statement: str, **values: object) -> list[dict[str, Any]]:
    """The answer of the database itself."""

    async def answered() -> list[dict[str, Any]]:
        engine = make_engine([database.url], DatabaseSettings())
        try:
            async with engine.begin() as connection:
                found = await connection.execute(text(statement), values)
                return [dict(row._mapping) for row in found] if found.returns_rows else []
        finally:
            await engine.dispose()

    return asyncio.run(answered())


def upgrade(url: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "atoll.cli", "db", "upgrade", "--database-url", url],
        env=os.environ,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def note(token: str) -> str:
    """Python code that writes the token down, with one write, and prints it."""
    return f"with open('ran', 'a') as file: file.write({token + chr(10)!r})\nprint({token!r})\n"


class Ground:
    """A server of Atoll's on a server of a database's."""

    def __init__(self, database: DatabaseServer, server: Server) -> None:
        self.database = database
        self.server = server

    @contextmanager
    def calling(self) -> Iterator[Api]:
        """A client for one thread."""
        with self.server.client() as http:
            yield Api(http)

    @property
    def pid(self) -> int:
        assert self.server.process is not None
        assert self.server.process.poll() is None
        return self.server.process.pid

    def instances(self) -> set[str]:
        return {path.name for path in (self.server.data_dir / "node" / "instances").iterdir()}

    def pending(self) -> list[str]:
        return [
            row["id"]
            for row in ask(self.database, f"SELECT id FROM executions WHERE {UNFINISHED}")
        ]


@pytest.fixture(scope="module", params=KINDS)
def ground(
    request: pytest.FixtureRequest, bubblewrap: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ground]:
    place = tmp_path_factory.mktemp("outage")
    kind: type[DatabaseServer] = request.param
    with kind(place) as database:
        upgrade(database.url)
        with Server(place, ATOLL_DATABASE_URL=database.url, **SETTINGS) as server:
            yield Ground(database, server)


class Load:
    """Clients that execute all the time, each in a session of its own, until they are stopped."""

    def __init__(self, calling: list[Callable[[], Any]]) -> None:
        self._calling = calling
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._done = threading.Condition(self._lock)
        self._threads = ThreadPoolExecutor(len(calling))
        self._futures: list[Future[None]] = []
        self.sessions: list[str] = []
        self.accepted: dict[str, tuple[str, str]] = {}
        """Execution ids: the session and the token."""
        self.refused: list[tuple[str, str]] = []
        """Session and token."""
        self.slowest = 0.0

    def __enter__(self) -> Load:
        for calling in self._calling:
            with calling() as api:
                self.sessions.append(api.create(timeout=900)["id"])
        for number, calling in enumerate(self._calling):
            self._futures.append(
                self._threads.submit(self._client, calling, self.sessions[number], number % 2 == 0)
            )
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._threads.shutdown()
        if error[0] is None:
            for future in self._futures:
                future.result()

    def _client(self, calling: Callable[[], Any], session_id: str, waits: bool) -> None:
        with calling() as api:
            while not self._stop.is_set():
                token = uuid.uuid4().hex
                fields: dict[str, Any] = {"wait": 20} if waits else {}
                began = time.monotonic()
                response = api.execute(session_id, code=note(token), timeout=120, **fields)
                took = time.monotonic() - began
                with self._lock:
                    self._told(response, session_id, token)
                    if response.status_code == 503:
                        self.slowest = max(self.slowest, took)
                    self._done.notify_all()
                if response.status_code in (429, 503):
                    self._stop.wait(0.2)

    def _told(self, response: httpx.Response, session_id: str, token: str) -> None:
        if response.status_code == 200:
            told = answer(response)
            assert told["stdout"] == f"{token}\n", told
            self.accepted[told["execution_id"]] = (session_id, token)
        elif response.status_code == 202:
            self.accepted[answer(response, 202)["execution_id"]] = (session_id, token)
        elif response.status_code == 503:
            problem(response, 503, "database_unavailable")
            assert int(response.headers["retry-after"]) >= 1
            self.refused.append((session_id, token))
        else:
            problem(response, 429, "session_busy")
            self.refused.append((session_id, token))

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        with self._lock:
            came = self._done.wait_for(
                lambda: condition() or any(future.done() for future in self._futures), seconds
            )
            assert came, "it did not happen in time"
        if not condition():
            for future in self._futures:
                if future.done():
                    future.result()

    def more(self, count: int = 20) -> None:
        """Wait until so many more were accepted."""
        wanted = len(self.accepted) + count
        self._wait(lambda: len(self.accepted) >= wanted, RECOVERED)

    def until_refused(self) -> None:
        """Wait until somebody is told that the database is away."""
        wanted = len(self.refused) + 1
        self._wait(lambda: len(self.refused) >= wanted, BOUNDED)

    def check(self, api: Api) -> None:
        """Everything that was accepted has its record and ran once; nothing else ran."""
        assert self.slowest < BOUNDED
        for execution_id, (_, token) in self.accepted.items():
            result = api.result(execution_id, wait=RECOVERED)
            assert (result["status"], result["stdout"]) == ("success", f"{token}\n"), result
            assert "stale" not in result
        for session_id in self.sessions:
            ran = api.http.get(f"{V1}/sessions/{session_id}/files/ran").text.splitlines()
            accepted = [token for session, token in self.accepted.values() if session == session_id]
            assert sorted(ran) == sorted(accepted)


def leave_nothing_pending(ground: Ground, accepted: set[str]) -> None:
    """
    What reached the table though it was refused is ended too; made older than it is, because that
    takes a minute.
    """
    strays = set(ground.pending())
    assert not strays & accepted
    age = int(STRAY.total_seconds() * 1e6)
    ask(
        ground.database,
        f"UPDATE executions SET created_at = created_at - :age WHERE {UNFINISHED}",
        age=age,
    )
    eventually(lambda: not ground.pending(), RECOVERED)
    for execution_id in strays:
        with ground.calling() as api:
            assert api.result(execution_id)["status"] == "crashed"


def stale(response: httpx.Response) -> dict[str, Any]:
    told = answer(response)
    assert told.pop("stale") is True
    assert response.headers["warning"].startswith("110 ")
    assert int(response.headers["age"]) >= 0
    return told


class Bounded(httpx.BaseTransport):
    """Holds every request to the bound, with a number of how long they took."""

    def __init__(self) -> None:
        self._inner = httpx.HTTPTransport()
        self.slowest = 0.0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        began = time.monotonic()
        response = self._inner.handle_request(request)
        took = time.monotonic() - began
        self.slowest = max(self.slowest, took)
        assert took < BOUNDED, f"{request.method} {request.url} took {took} s"
        return response

    def close(self) -> None:
        self._inner.close()


class Known:
    """What a client knows from before the outage."""

    def __init__(self, api: Api) -> None:
        self.session = api.create(timeout=900)
        self.execution_id = api.run(self.session["id"], "print(7)")["execution_id"]
        self.execution = api.execution(self.execution_id)
        self.result = api.result(self.execution_id)
        self.long_session = api.create(timeout=900)["id"]
        self.token = uuid.uuid4().hex
        self.long = api.submit(self.long_session, until("go") + note(self.token), timeout=120)
        api.await_status(self.long, "running")
        self.key = uuid.uuid4().hex

    def keyed(self, api: Api) -> httpx.Response:
        return api.http.post(
            f"{V1}/sessions/{self.session['id']}/execute",
            json={"code": note(self.key), "wait": 20},
            headers={"Idempotency-Key": self.key},
        )


def check_outage(ground: Ground, known: Known) -> None:
    """Every kind of answer while the database is away, and known to be."""
    transport = Bounded()
    with ground.server.client(transport=transport) as http:
        api, session_id = Api(http), known.session["id"]

        path = f"{V1}/executions/{known.execution_id}"

        def shown(url: str) -> dict[str, Any]:
            return stale(http.get(url))

        # At once, because a database that is silent makes each of them wait for it.
        with ThreadPoolExecutor(8) as threads:
            session = threads.submit(shown, f"{V1}/sessions/{session_id}")
            execution = threads.submit(shown, path)
            status = threads.submit(shown, f"{path}/status")
            results = [threads.submit(shown, f"{path}/result?wait={wait}") for wait in (0, 5)]
            unknown = [
                f"{V1}/sessions/sess_{uuid.uuid4().hex}",
                f"{V1}/executions/exec_{uuid.uuid4().hex}",
                f"{V1}/executions/exec_{uuid.uuid4().hex}/result",
                f"{V1}/sessions",
                f"{V1}/sessions/{session_id}/executions",
                f"{V1}/templates",
                "/ready",
            ]
            refused = [threads.submit(http.get, url) for url in unknown]
            assert session.result() == known.session
            assert execution.result() == known.execution
            assert status.result()["status"] == "completed"
            assert [result.result() for result in results] == [known.result] * 2

            # None of the writes costs a ready instance.
            instances = ground.instances()
            refused += [threads.submit(http.post, f"{V1}/sessions", json={}) for _ in range(3)]
            refused += [
                threads.submit(api.execute, session_id, code="print(1)"),
                threads.submit(api.execute, session_id, code="print(1)", wait=5),
                threads.submit(http.delete, f"{V1}/sessions/{session_id}"),
                threads.submit(known.keyed, api),
            ]
            for response in refused:
                problem(response.result(), 503, "database_unavailable")
                assert int(response.result().headers["retry-after"]) >= 1
            assert ground.instances() == instances

        # Who calls, and whether this process lives
        assert http.get("/health").status_code == 200
        wrong = {"Authorization": f"Bearer {uuid.uuid4().hex}"}
        for method, url in (("GET", f"{V1}/sessions/{session_id}"), ("POST", f"{V1}/sessions")):
            problem(http.request(method, url, headers=wrong), 401, "key_unknown")

        # What runs goes on, can be reached, and ends; it is not told before it is written.
        response = http.get(f"{V1}/executions/{known.long}/result")
        problem(response, 409, "execution_not_finished")
        api.put(known.long_session, "go")
        eventually(lambda: "ran" in api.names(known.long_session), BOUNDED)
        told = api.execution(known.long)
        assert told["status"] == "running"
        response = http.get(f"{V1}/executions/{known.long}/result?wait=1")
        problem(response, 409, "execution_not_finished")
    print(f"slowest answer during the outage: {transport.slowest:.1f} s")


def check_recovery(ground: Ground, known: Known, waiting: Future[dict[str, Any]]) -> None:
    began = time.monotonic()
    with ground.calling() as api:
        eventually(lambda: api.http.get("/ready").status_code == 200, RECOVERED)
        ready = time.monotonic() - began
        result = waiting.result(RECOVERED)
        ended = time.monotonic() - began
        assert (result["status"], result["stdout"]) == ("success", f"{known.token}\n")
        assert api.result(known.long) == result
        assert "stale" not in answer(api.http.get(f"{V1}/sessions/{known.session['id']}"))

        keyed = answer(known.keyed(api))
        assert answer(known.keyed(api)) == keyed
        ran = api.http.get(f"{V1}/sessions/{known.session['id']}/files/ran").text
        assert ran == f"{known.key}\n"
        created = api.create(timeout=900)["id"]
        assert api.run(created, "print(8)")["stdout"] == "8\n"
        for session_id in (created, known.session["id"], known.long_session):
            assert api.end(session_id)["status"] == "terminated"
    print(f"ready after {ready:.1f} s, the result after {ended:.1f} s")
    assert ended < RECOVERED


def test_a_database_that_is_back_at_once_is_not_missed(ground: Ground) -> None:
    pid = ground.pid
    with Load([ground.calling] * 4) as load, ground.calling() as api:
        session = api.create(timeout=900)["id"]
        token = uuid.uuid4().hex
        long = api.submit(session, until("go") + note(token), timeout=120)
        api.await_status(long, "running")
        load.more()

        ground.database.kill()
        ground.database.start()
        api.put(session, "go")

        load.more()
        result = api.result(long, wait=RECOVERED)
        assert (result["status"], result["stdout"]) == ("success", f"{token}\n")
    with ground.calling() as api:
        load.check(api)
        for session_id in (session, *load.sessions):
            api.end(session_id)
    leave_nothing_pending(ground, set(load.accepted))
    assert ground.pid == pid


@pytest.mark.parametrize("way", ["killed", "silent"])
def test_a_database_that_stays_away(ground: Ground, way: str) -> None:
    pid = ground.pid
    with (
        Load([ground.calling] * 4) as load,
        ground.calling() as api,
        ground.calling() as other,
        ThreadPoolExecutor(1) as threads,
    ):
        known = Known(api)
        waiting = threads.submit(other.result, known.long, wait=2 * RECOVERED)
        load.more()
        if way == "killed":
            ground.database.kill()
        else:
            ground.database.pause()
        try:
            load.until_refused()
            check_outage(ground, known)
        finally:
            if way == "killed":
                ground.database.start()
            else:
                ground.database.resume()
        check_recovery(ground, known, waiting)
        load.more()
    print(f"slowest refusal: {load.slowest:.1f} s")
    with ground.calling() as api:
        load.check(api)
        for session_id in load.sessions:
            api.end(session_id)
    leave_nothing_pending(ground, set(load.accepted))
    assert ground.pid == pid
