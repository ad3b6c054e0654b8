"""
The database becomes unavailable under load and recovers: accepted executions end once, no response
is wrong, and the control plane needs no restart.

The servers are real ones, killed or suspended. The settings only shorten the time-outs of Atoll.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from atoll.reconcile.executions import STRAY_AGE
from atoll.settings import DatabaseSettings
from atoll.stores.sql.server.connect import make_engine
from tests import preloaded
from tests.e2e.api import V1, Api, answer, eventually, problem, until
from tests.harness import Server
from tests.servers.mariadb import MariaDB
from tests.servers.postgres import PostgreSQL
from tests.servers.process import DatabaseServer
from tests.servers.redis import RedisServer

from .proxy import Proxy

SETTINGS = {
    "ATOLL_DATABASE__CONNECT_TIMEOUT": "1",
    "ATOLL_DATABASE__OPERATION_TIMEOUT": "2",
    "ATOLL_DATABASE__RETRY_BACKOFF": "0.5",
    "ATOLL_COORDINATION__PRESENCE_TTL": "3",
    "ATOLL_POOL__SIZE": "2",
    "ATOLL_POOL__MAX_SIZE": "2",
    # Otherwise each workspace is an image, which is slow to make and irrelevant here.
    "ATOLL_SESSION__DISK": str(16 * 2**20),
}
KINDS = [pytest.param(MariaDB, id="mariadb"), pytest.param(PostgreSQL, id="postgresql")]
BOUNDED = 30.0
"""Seconds within which every request must return, whatever the database does."""
RETRIES = 6.0
"""Seconds after which a call has given up a database that is gone: all its pauses, and more."""
RECOVERED = 60.0
"""Seconds in which all is as before once the database is back."""
UNFINISHED = "status IN ('pending', 'running')"


def ask(url: str, statement: str, **values: object) -> list[dict[str, Any]]:
    async def answered() -> list[dict[str, Any]]:
        engine = make_engine([url], DatabaseSettings())
        try:
            async with engine.begin() as connection:
                found = await connection.execute(text(statement), values)
                return [dict(row._mapping) for row in found] if found.returns_rows else []
        finally:
            await engine.dispose()

    return asyncio.run(answered())


def upgrade(url: str) -> None:
    done = preloaded.run("db", "upgrade", "--database-url", url)
    assert done.returncode == 0, done.stderr


def note(token: str) -> str:
    """Python code that writes the token down, with one write, and prints it."""
    return f"with open('ran', 'a') as file: file.write({token + chr(10)!r})\nprint({token!r})\n"


def ran_in(api: Api, session_id: str) -> list[str]:
    """The tokens that were written down in a session."""
    response = api.http.get(f"{V1}/sessions/{session_id}/files/ran")
    if response.status_code == 404:
        return []
    assert response.status_code == 200, response.text
    return response.text.splitlines()


class Environment:
    """A server of Atoll's on a server of a database's."""

    def __init__(self, database: DatabaseServer, server: Server, name: str = "atoll") -> None:
        self.database = database
        self.server = server
        self.name = name

    def ask(self, statement: str, **values: object) -> list[dict[str, Any]]:
        """The answer of the database itself."""
        return ask(self.database.url_of(self.name), statement, **values)

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

    def ready(self) -> int:
        """How many instances wait for a session."""
        (row,) = self.ask(
            "SELECT COUNT(*) AS found FROM instances WHERE session_id IS NULL "
            "AND id NOT IN (SELECT instance_id FROM sessions WHERE instance_id IS NOT NULL)"
        )
        found: int = row["found"]
        return found

    def kill_instance(self, instance_id: str) -> None:
        path = self.server.data_dir / "node" / "instances" / instance_id / "handle.json"
        os.kill(json.loads(path.read_text())["data"]["child"], signal.SIGKILL)

    def pending(self) -> list[str]:
        return [row["id"] for row in self.ask(f"SELECT id FROM executions WHERE {UNFINISHED}")]


@pytest.fixture(scope="module", params=KINDS)
def environment(
    request: pytest.FixtureRequest, bubblewrap: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Environment]:
    directory = tmp_path_factory.mktemp("outage")
    kind: type[DatabaseServer] = request.param
    with kind(directory) as database:
        upgrade(database.url)
        with Server(directory, ATOLL_DATABASE_URL=database.url, **SETTINGS) as server:
            yield Environment(database, server)


class Load:
    """Clients that execute code repeatedly, each in its own session, until they are stopped."""

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
                if response.status_code != 200:
                    # Paced, so that accepted executions also finish.
                    self._stop.wait(0.1)

    def _told(self, response: httpx.Response, session_id: str, token: str) -> None:
        if response.status_code == 200:
            reply = answer(response)
            assert reply["stdout"] == f"{token}\n", reply
            self.accepted[reply["execution_id"]] = (session_id, token)
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
        """Wait until a response reports that the database is unavailable."""
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
            ran = ran_in(api, session_id)
            accepted = [token for session, token in self.accepted.values() if session == session_id]
            assert sorted(ran) == sorted(accepted)


def end_pending(environment: Environment, accepted: set[str]) -> None:
    """
    What reached the table though it was refused is ended too; made older than it is, because that
    takes a minute.
    """
    strays = set(environment.pending())
    assert not strays & accepted
    age = int(STRAY_AGE.total_seconds() * 1e6)
    environment.ask(
        f"UPDATE executions SET created_at = created_at - :age WHERE {UNFINISHED}",
        age=age,
    )
    eventually(lambda: not environment.pending(), RECOVERED)
    for execution_id in strays:
        with environment.calling() as api:
            assert api.execution(execution_id)["status"] == "crashed"


def stale(response: httpx.Response) -> dict[str, Any]:
    reply = answer(response)
    assert reply.pop("stale") is True
    assert response.headers["warning"].startswith("110 ")
    assert int(response.headers["age"]) >= 0
    return reply


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
    """State from before the outage."""

    def __init__(self, environment: Environment, api: Api) -> None:
        self.session = api.create(timeout=900)
        self.execution_id = api.run(self.session["id"], "print(7)")["execution_id"]
        self.execution = api.execution(self.execution_id)
        self.result = api.result(self.execution_id)
        self.long_session = api.create(timeout=900)["id"]
        self.token = uuid.uuid4().hex
        self.long = api.submit(self.long_session, until("go") + note(self.token), timeout=120)
        api.await_status(self.long, "running")
        self.doomed_session = api.create(timeout=900)["id"]
        # Waits for ever, unless it is begun once more.
        twice = f"len(open('ran').read().split('{self.token}')) < 3"
        code = note(self.token) + f"import time\nwhile {twice}: time.sleep(0.01)\n"
        self.doomed = api.submit(self.doomed_session, code, timeout=120)
        eventually(lambda: "ran" in api.names(self.doomed_session))
        (row,) = environment.ask(
            "SELECT instance_id FROM sessions WHERE id = :id", id=self.doomed_session
        )
        self.instance_id: str = row["instance_id"]
        self.key = uuid.uuid4().hex

    def keyed(self, api: Api) -> httpx.Response:
        return api.http.post(
            f"{V1}/sessions/{self.session['id']}/execute",
            json={"code": note(self.key), "wait": 20},
            headers={"Idempotency-Key": self.key},
        )


def check_outage(environment: Environment, known: Known) -> None:
    """Every kind of response while the database is known to be unavailable."""
    transport = Bounded()
    with environment.server.client(transport=transport) as http:
        api, session_id = Api(http), known.session["id"]

        path = f"{V1}/executions/{known.execution_id}"

        def shown(url: str) -> dict[str, Any]:
            return stale(http.get(url))

        # Concurrently, because each of them waits for a silent database.
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

            # None of the writes uses a ready instance.
            instances = environment.instances()
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
            assert environment.instances() == instances

        # Authentication and liveness
        assert http.get("/health").status_code == 200
        wrong = {"Authorization": f"Bearer {uuid.uuid4().hex}"}
        for method, url in (("GET", f"{V1}/sessions/{session_id}"), ("POST", f"{V1}/sessions")):
            problem(http.request(method, url, headers=wrong), 401, "key_unknown")

        # A running execution continues, can be reached, and ends; its result is returned only once
        # it is stored.
        result = f"{V1}/executions/{known.long}/result"
        problem(http.get(result), 409, "execution_not_finished")
        environment.kill_instance(known.instance_id)
        api.put(known.long_session, "go")
        eventually(lambda: "ran" in api.names(known.long_session), BOUNDED)
        record = api.execution(known.long)
        assert record["status"] == "running"
        problem(http.get(f"{result}?wait=1"), 409, "execution_not_finished")
    print(f"slowest answer during the outage: {transport.slowest:.1f} s")


def check_recovery(environment: Environment, known: Known, waiting: Future[dict[str, Any]]) -> None:
    began = time.monotonic()
    with environment.calling() as api:
        eventually(lambda: api.http.get("/ready").status_code == 200, RECOVERED)
        ready = time.monotonic() - began
        result = waiting.result(RECOVERED)
        ended = time.monotonic() - began
        assert (result["status"], result["stdout"]) == ("success", f"{known.token}\n")
        assert api.result(known.long) == result
        assert "stale" not in answer(api.http.get(f"{V1}/sessions/{known.session['id']}"))

        # Its instance died during the outage: it is retried in a new one, and counted.
        doomed = api.result(known.doomed, wait=RECOVERED)
        assert doomed["status"] == "success", doomed
        assert api.execution(known.doomed)["retry_count"] == 1
        assert api.run(known.doomed_session, "print(9)")["stdout"] == "9\n"
        assert ran_in(api, known.doomed_session) == [known.token] * 2

        keyed = answer(known.keyed(api))
        assert answer(known.keyed(api)) == keyed
        assert ran_in(api, known.session["id"]) == [known.key]
        created = api.create(timeout=900)["id"]
        assert api.run(created, "print(8)")["stdout"] == "8\n"
        for session_id in (created, known.session["id"], known.long_session, known.doomed_session):
            assert api.end(session_id)["status"] == "terminated"
    print(f"ready after {ready:.1f} s, the result after {ended:.1f} s")
    assert ended < RECOVERED


def test_a_short_outage_of_the_database_loses_no_accepted_execution(
    environment: Environment,
) -> None:
    pid = environment.pid
    with Load([environment.calling] * 4) as load, environment.calling() as api:
        session = api.create(timeout=900)["id"]
        token = uuid.uuid4().hex
        long = api.submit(session, until("go") + note(token), timeout=120)
        api.await_status(long, "running")
        load.more()

        environment.database.kill()
        environment.database.start()
        api.put(session, "go")

        load.more()
        result = api.result(long, wait=RECOVERED)
        assert (result["status"], result["stdout"]) == ("success", f"{token}\n")
    with environment.calling() as api:
        load.check(api)
        for session_id in (session, *load.sessions):
            api.end(session_id)
    end_pending(environment, set(load.accepted))
    assert environment.pid == pid


@pytest.mark.parametrize("way", ["killed", "silent"])
def test_the_server_recovers_from_a_long_outage_of_the_database(
    environment: Environment, way: str
) -> None:
    pid = environment.pid
    with (
        Load([environment.calling] * 4) as load,
        environment.calling() as api,
        environment.calling() as other,
        ThreadPoolExecutor(1) as threads,
    ):
        known = Known(environment, api)
        waiting = threads.submit(other.result, known.long, wait=2 * RECOVERED)
        load.more()
        # Otherwise additional instances would be started.
        eventually(lambda: environment.ready() == 2, BOUNDED)
        if way == "killed":
            environment.database.kill()
        else:
            environment.database.pause()
        try:
            until_retries_are_over = time.monotonic() + RETRIES
            load.until_refused()
            check_outage(environment, known)
            # Those that were under way when it went have given up too.
            eventually(lambda: time.monotonic() > until_retries_are_over, BOUNDED)
        finally:
            if way == "killed":
                environment.database.start()
            else:
                environment.database.resume()
        check_recovery(environment, known, waiting)
        load.more()
    print(f"slowest refusal: {load.slowest:.1f} s")
    with environment.calling() as api:
        load.check(api)
        for session_id in load.sessions:
            api.end(session_id)
    end_pending(environment, set(load.accepted))
    assert environment.pid == pid


def test_a_refused_but_recorded_execution_neither_runs_nor_stays(
    environment: Environment, tmp_path: Path
) -> None:
    url = environment.database.new_database()
    upgrade(url)
    with Proxy(environment.database.port) as proxy:
        url = url.replace(f":{environment.database.port}/", f":{proxy.port}/")
        with Server(tmp_path, ATOLL_DATABASE_URL=url, **SETTINGS) as server:
            there = Environment(environment.database, server, name=url.rpartition("/")[2])
            with there.calling() as api:
                eventually(lambda: there.ready() == 2, BOUNDED)
                session = api.create(timeout=900)["id"]
                assert api.run(session, note("first"))["stdout"] == "first\n"
                # The pool is full again, so next to nothing else is written.
                eventually(lambda: there.ready() == 2, BOUNDED)

                token = uuid.uuid4().hex
                # The record and its commit are one message.
                proxy.cut_response_to(token.encode())
                try:
                    refused = api.execute(session, code=note(token))
                    problem(refused, 503, "database_unavailable")
                    assert proxy.cut.is_set()
                    (stray,) = there.pending()
                finally:
                    proxy.mend()

                eventually(lambda: api.http.get("/ready").status_code == 200, RECOVERED)
                assert api.run(session, note("third"))["stdout"] == "third\n"
                end_pending(there, set())
                record = api.execution(stray)
                assert record["status"] == "crashed"
                assert "was not run" in record["error"]["message"]
                assert ran_in(api, session) == ["first", "third"]
                api.end(session)


def copied(original: DatabaseServer, directory: Path) -> DatabaseServer:
    """Another server with a copy of the data of a stopped one."""
    copy = type(original)(directory)
    subprocess.run(["cp", "-a", original.place / "data", copy.place / "data"], check=True)
    copy._prepared = True
    return copy


def test_a_second_database_server_replaces_a_killed_one(bubblewrap: str, tmp_path: Path) -> None:
    data, places = tmp_path / "server", [tmp_path / "a", tmp_path / "b"]
    for place in (data, *places):
        place.mkdir()
    with MariaDB(places[0]) as first:
        upgrade(first.url)
        # What a copy of the database must hold as well: whose data directory it is.
        with Server(data, ATOLL_DATABASE_URL=first.url, **SETTINGS):
            pass
        first.stop()
        with copied(first, places[1]) as second:
            first.start()
            urls = f"{first.url},{second.url}"
            with Server(data, ATOLL_DATABASE_URLS=urls, **SETTINGS) as server:
                both = [Environment(database, server) for database in (first, second)]
                with both[0].calling() as api:
                    before = api.create(timeout=900)["id"]
                    assert api.run(before, note("a"))["stdout"] == "a\n"
                    assert [len(it.ask("SELECT id FROM sessions")) for it in both] == [1, 0]
                    api.end(before)
                    pid = both[0].pid

                    first.kill()
                    began = time.monotonic()
                    eventually(lambda: api.http.get("/ready").status_code == 200, RECOVERED)
                    with Load([both[1].calling] * 2) as load:
                        load.more(10)
                    print(f"ten executions {time.monotonic() - began:.1f} s after the kill")
                    load.check(api)
                    assert len(both[1].ask("SELECT id FROM executions")) == len(load.accepted)
                    assert both[1].pid == pid
                    for session_id in load.sessions:
                        api.end(session_id)
                end_pending(both[1], set(load.accepted))


def test_databases_of_two_kinds_are_refused(
    mariadb: MariaDB, postgresql: PostgreSQL, tmp_path: Path
) -> None:
    urls = f"{mariadb.url},{postgresql.url}"
    done = subprocess.run(
        [sys.executable, "-m", "atoll.cli", "serve", "--port", "0", "--data-dir", tmp_path],
        env={**os.environ, "ATOLL_DATABASE_URLS": urls},
        capture_output=True,
        text=True,
        timeout=BOUNDED,
        check=False,
    )
    assert done.returncode != 0
    assert "listens on" not in done.stdout
    assert "mariadb" in done.stderr
    assert "postgresql" in done.stderr
    assert "Traceback" not in done.stderr


class Replica(Server):
    def __init__(self, data_dir: Path, name: str, **env: str) -> None:
        super().__init__(data_dir, **env)
        self.name = name

    def __exit__(self, *error: object) -> None:
        # Neither server removes the leftovers of the other.
        if self.process is not None:
            self.stop()


def test_replicas_keep_their_leases_while_the_database_is_unavailable(
    bubblewrap: str, tmp_path: Path
) -> None:
    presence = 8.0
    with RedisServer(tmp_path) as redis, PostgreSQL(tmp_path) as database:
        upgrade(database.url)
        settings = {
            **SETTINGS,
            "ATOLL_REDIS_URL": redis.url,
            "ATOLL_DATABASE_URL": database.url,
            "ATOLL_COORDINATION__PRESENCE_TTL": str(presence),
            "ATOLL_COORDINATION__LEASE_TTL": "16",
        }
        with (
            Server(tmp_path, **settings) as first,
            Replica(tmp_path, "second", **settings) as second,
        ):
            grounds = [Environment(database, first), Environment(database, second)]
            pids = [environment.pid for environment in grounds]
            with (
                Load([environment.calling for environment in grounds * 2]) as load,
                grounds[0].calling() as api,
                grounds[1].calling() as other,
            ):
                runs = []
                for replica in (api, other):
                    session = api.create(timeout=900)["id"]
                    code = note(session) + until("go")
                    runs.append((session, replica.submit(session, code, timeout=120)))
                eventually(lambda: all(ran_in(api, session) for session, _ in runs), BOUNDED)
                found = grounds[0].ask("SELECT id, holder FROM executions")
                held = {row["id"]: row["holder"] for row in found}
                load.more()

                database.kill()
                load.until_refused()
                # Heartbeats continue long enough for replicas without them to count as lost.
                away = time.monotonic() + 1.5 * presence
                eventually(lambda: time.monotonic() > away, 60)
                for session, _ in runs:
                    api.put(session, "go")
                database.start()
                began = time.monotonic()

                for session, execution_id in runs:
                    results = [one.result(execution_id, wait=RECOVERED) for one in (api, other)]
                    assert results[0] == results[1]
                    assert (results[0]["status"], results[0]["stdout"]) == (
                        "success", f"{session}\n",
                    )  # fmt: skip
                    (row,) = grounds[0].ask(
                        "SELECT holder FROM executions WHERE id = :id", id=execution_id
                    )
                    assert row["holder"] == held[execution_id]
                    assert ran_in(api, session) == [session]
                print(f"results after {time.monotonic() - began:.1f} s")
                load.more()
            print(f"all in after {time.monotonic() - began:.1f} s, {len(load.accepted)} accepted")
            with grounds[0].calling() as api, grounds[1].calling() as other:
                load.check(api)
                load.check(other)
                for session in (*load.sessions, *(session for session, _ in runs)):
                    api.end(session)
            end_pending(grounds[0], set(load.accepted))
            assert [environment.pid for environment in grounds] == pids
            for words in ("execution.adopted", "lease.lost", "replica.was_lost"):
                assert words not in first.stderr()
            assert second.stop() == 0
