"""
A cluster of several control planes: `atoll serve` processes on one database, one Redis and one
node.

Members are started, stopped, killed and suspended individually. When the cluster ends, it checks
that every execution has ended, that database and node agree, that no process is left running, and
that no member logged an error.
"""

from __future__ import annotations

import asyncio
import glob
import hashlib
import json
import os
import re
import select
import signal
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import httpx
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from tests import drivers, preloaded
from tests.e2e.api import V1, Api, answer, eventually
from tests.harness import Server
from tests.servers.redis import RedisServer
from tests.standstill import go_on, stand_still

PRESENCE, LEASE = 4.0, 10.0
"""Seconds after which a member counts as lost, and its leases with it."""
LONG = 60.0
"""Seconds in which anything that happens at all has happened."""
DRIVERS = {"mysql": "mysql+aiomysql", "postgresql": "postgresql+asyncpg"}
MARK = "REPLICAS_OF_THE_TEST"
UNFINISHED = "('pending', 'running')"
LIVING = "('creating', 'running')"


class Member(Server):
    """One replica, with its own log and a new client for each start."""

    def __init__(self, data_dir: Path, name: str, *arguments: str, **env: str) -> None:
        super().__init__(data_dir, *arguments, **env)
        self.name = name
        self.log_path = data_dir / f"{name}.log"
        self.paused = False
        self._http: httpx.Client | None = None

    @property
    def up(self) -> bool:
        return self.process is not None

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} does not run"
        return self.process.pid

    @property
    def api(self) -> Api:
        if self._http is None:
            self._http = self.client()
        return Api(self._http)

    @contextmanager
    def calling(self) -> Iterator[Api]:
        """A client for one thread."""
        with self.client() as http:
            yield Api(http)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.resume()
        if self._http is not None:
            self._http.close()
            self._http = None
        return super().stop(number)

    def kill(self) -> None:
        """Kill it without warning, suspended or not."""
        assert self.process is not None
        self.process.kill()
        self.paused = False
        self.stop(signal.SIGKILL)

    def pause(self) -> None:
        """Suspend it: it answers nothing, and does not notice the time that passes."""
        eventually(self._freeze, LONG)

    def _freeze(self) -> bool:
        """Not in the middle of a write to SQLite, which would keep all others from writing."""
        stand_still(self.pid)
        self.paused = True
        if self._writes():
            self.resume()
        return self.paused

    def _writes(self) -> bool:
        """Whether a process holds the only write lock of a SQLite file."""
        default = f"sqlite:///{self.data_dir / 'atoll.db'}"
        kind, _, path = self._env.get("ATOLL_DATABASE_URL", default).partition(":///")
        if kind != "sqlite":
            return False
        # Only briefly: others wait for it, and a suspended replica soon counts as lost.
        with closing(sqlite3.connect(path, timeout=0.5, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                return True
            connection.execute("ROLLBACK")
        return False

    def resume(self) -> None:
        if self.paused:
            go_on(self.pid)
            self.paused = False

    def errors(self) -> list[str]:
        """What it logged as an error, and what broke without being logged, with tracebacks."""
        log = self.stderr() if self.log_path.exists() else ""
        # An entry begins with its time, and a traceback follows it.
        return [
            entry
            for entry in re.split(r"\n(?=\d{4}-\d\d-\d\dT)", log)
            if re.search(r"\[error |^Fatal|Exception in callback|never ", entry, re.MULTILINE)
            # Uvicorn's word for requests that waited when a server ended.
            and "graceful shutdown exceeded" not in entry
        ]


class Cluster:
    def __init__(
        self,
        place: Path,
        *,
        size: int = 2,
        database_url: str | None = None,
        with_redis: bool = True,
        **env: str,
    ) -> None:
        self.redis = RedisServer(place)
        self._with_redis = with_redis
        self.data_dir = place / "data"
        self.data_dir.mkdir()
        self.database_url = database_url
        self._mark = uuid.uuid4().hex
        self._env = {
            MARK: self._mark,
            "ATOLL_COORDINATION__PRESENCE_TTL": str(PRESENCE),
            "ATOLL_COORDINATION__LEASE_TTL": str(LEASE),
            "ATOLL_SHUTDOWN_TIMEOUT": "5",
            "ATOLL_POOL__SIZE": "1",
            "ATOLL_POOL__MAX_SIZE": "1",
            # Otherwise each workspace is an image, which is slow to make and irrelevant here.
            "ATOLL_SESSION__DISK": str(16 * 2**20),
            "ATOLL_SECRETS__KEY": "42" * 32,
            **env,
        }
        if with_redis:
            self._env["ATOLL_REDIS_URL"] = self.redis.url
        if database_url is not None:
            self._env["ATOLL_DATABASE_URL"] = database_url
        self.members = [Member(self.data_dir, f"replica-{n}", **self._env) for n in range(size)]

    def __getitem__(self, number: int) -> Member:
        return self.members[number]

    def __len__(self) -> int:
        return len(self.members)

    @property
    def prefix(self) -> str:
        """What the names of its keys in Redis begin with."""
        return f"atoll.{(self.data_dir / 'cluster').read_text().split()[0]}"

    @property
    def apis(self) -> list[Api]:
        return [member.api for member in self.members]

    def start(self) -> Self:
        """Start all stopped members concurrently."""
        with ThreadPoolExecutor(len(self.members)) as threads:
            list(threads.map(Member.start, [one for one in self.members if not one.up]))
        return self

    def command(self, *arguments: str) -> str:
        """A local command with the cluster's settings; what it prints."""
        done = preloaded.run(*arguments, env={**self._env, "ATOLL_DATA_DIR": str(self.data_dir)})
        assert done.returncode == 0, done.stderr
        return done.stdout

    def __enter__(self) -> Self:
        if self._with_redis:
            self.redis.start()
        try:
            if self.database_url is not None:
                self.command("db", "upgrade")
            return self.start()
        except BaseException:
            self._abandon()
            raise

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._abandon()
            return
        try:
            if any(member.up for member in self.members):
                self.check_settled()
            self.end()
        except BaseException:
            self._abandon()
            raise
        if self._with_redis:
            self.redis.stop()
        logged = {one.name: one.errors() for one in self.members if one.errors()}
        assert not logged, logged

    def _abandon(self) -> None:
        """Stop everything after a failed test, whatever its state."""
        for member in self.members:
            if member.up:
                member.kill()
        if self._with_redis and self.redis.process is None:
            self.redis.start()
        with suppress(Exception):
            self.end()
        if self._with_redis:
            self.redis.kill()

    @contextmanager
    def extra_member(self, name: str, **env: str) -> Iterator[Member]:
        """An additional member with its own settings."""
        member = Member(self.data_dir, name, **{**self._env, **env})
        try:
            yield member.start()
        finally:
            if member.up:
                member.kill()
        assert member.errors() == []

    # The end

    def start_single(self, *arguments: str) -> Member:
        """Start a single server on the node, which removes leftovers."""
        return Member(self.data_dir, "alone", *arguments, **self._env).start()

    def end(self) -> None:
        """Stop all, then end for good what they left; nothing may be there after it."""
        for member in self.members:
            if member.up:
                assert member.stop() == 0, member.name
        last = self.start_single("--stop-sessions")
        assert last.stop() == 0
        assert last.errors() == []
        self.check_empty()
        eventually(lambda: not self.processes())
        assert self.groups() == []

    def check_empty(self) -> None:
        """Nothing is left on the node."""
        assert self.instances() == set()
        assert self.workspaces() == set()

    def check_settled(self) -> None:
        """Accepted executions have ended, and all members agree with the database."""
        self.start()
        self.wait_until_settled()
        apis = self.apis
        for row in self.rows("SELECT id, status FROM executions"):
            results = [api.result(row["id"], wait=0) for api in apis]
            assert all(result == results[0] for result in results), results
            assert {api.status(row["id"]) for api in apis} == {row["status"]}
        for row in self.rows("SELECT id, status FROM sessions"):
            statuses = [api.get(row["id"])["status"] for api in apis]
            assert statuses == [row["status"]] * len(apis), row

    def wait_until_settled(self, seconds: float = LONG) -> None:
        try:
            eventually(lambda: not self.unfinished(), seconds)
        except AssertionError:
            raise AssertionError(f"these do not end: {self.unfinished()}") from None

    def check_node(self) -> None:
        """
        After the start of a single server, the node has exactly what the database lists: the
        instances and workspaces of sessions, and the pool of that server.
        """
        for member in self.members:
            if member.up:
                assert member.stop() == 0, member.name
        one = self.start_single()
        try:
            nobodys = "SELECT id, workspace FROM instances WHERE session_id IS NULL"
            eventually(lambda: len(self.rows(nobodys)) == 1)
            pooled = self.rows(nobodys)
            sessions = self.rows(
                f"SELECT id, instance_id, workspace FROM sessions WHERE status IN {LIVING}"
            )
            known = {row["id"] for row in self.rows("SELECT id FROM instances")}
            owned = {row["instance_id"] for row in sessions if row["instance_id"]}
            assert self.instances() == known
            # A session whose instance died has none until the next request.
            assert known - {row["id"] for row in pooled} <= owned
            kept = {row["workspace"] for row in (*sessions, *pooled) if row["workspace"]}
            assert self.workspaces() == {json.loads(workspace) for workspace in kept}
            for row in sessions:
                assert one.api.run(row["id"], "print(1)")["stdout"] == "1\n"
        finally:
            assert one.stop() == 0
        assert one.errors() == []

    # The database

    def rows(self, statement: str, **values: object) -> list[dict[str, Any]]:
        if self.database_url is None:
            with closing(sqlite3.connect(self.data_dir / "atoll.db", timeout=LONG)) as connection:
                connection.row_factory = sqlite3.Row
                return [dict(row) for row in connection.execute(statement, values)]
        return asyncio.run(self._query(statement, values))

    async def _query(self, statement: str, values: dict[str, object]) -> list[dict[str, Any]]:
        assert self.database_url is not None
        scheme, rest = self.database_url.split("://")
        engine = create_async_engine(f"{DRIVERS[scheme]}://{rest}", poolclass=NullPool)
        try:
            async with engine.connect() as connection:
                found = await connection.execute(text(statement), values)
                return [dict(row._mapping) for row in found]
        finally:
            await engine.dispose()

    def row(self, execution_id: str) -> dict[str, Any]:
        (found,) = self.rows("SELECT * FROM executions WHERE id = :id", id=execution_id)
        return found

    def holder(self, execution_id: str) -> str:
        return str(self.row(execution_id)["holder"])

    def unfinished(self) -> list[str]:
        rows = self.rows(f"SELECT id FROM executions WHERE status IN {UNFINISHED}")
        return [row["id"] for row in rows]

    # The node

    def instances(self) -> set[str]:
        return drivers.instances(self.data_dir)

    def workspaces(self) -> set[str]:
        return drivers.workspaces(self.data_dir)

    def init_of(self, instance_id: str) -> int:
        """The pid of an instance's first process."""
        return int(drivers.handle(self.data_dir, instance_id)["child"])

    def kill_instance(self, instance_id: str) -> None:
        """End it with all that runs in it, and wait for that."""
        init = self.init_of(instance_id)
        descriptor = os.pidfd_open(init)
        try:
            os.kill(init, signal.SIGKILL)
            assert select.select([descriptor], [], [], LONG)[0]
        finally:
            os.close(descriptor)

    def groups(self) -> list[Path]:
        """The control groups of this node, in whichever hierarchy and version."""
        node = (self.data_dir / "node").resolve()
        name = f"atoll-{hashlib.sha256(str(node).encode()).hexdigest()[:12]}"
        # Not by pathlib, which raises when another Atoll removes a group just then.
        return [Path(found) for depth in ("", "*/", "*/*/", "*/*/*/")
                for found in glob.glob(f"/sys/fs/cgroup/{depth}{name}")]  # fmt: skip

    def processes(self) -> list[int]:
        """What was started by this cluster and runs: it bears the mark, or is in a group."""
        mark = f"{MARK}={self._mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (path / "environ").read_bytes():
                    found.append(int(path.name))
        for group in self.groups():
            for procs in group.rglob("cgroup.procs"):
                with suppress(OSError):
                    found += [int(pid) for pid in procs.read_text().split()]
        return found


# What tests do through members


def concurrently(*calls: Callable[[], Any]) -> list[Any]:
    """All of them in threads of their own; their results."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def note(token: str, name: str = "ran") -> str:
    """Python code that adds a line to a file, with one write."""
    return f"import os\nwith open({name!r}, 'a') as file: file.write({token + chr(10)!r})\n"


def lines(api: Api, session_id: str, name: str = "ran") -> list[str]:
    response = api.http.get(f"{V1}/sessions/{session_id}/files/{name}")
    if response.status_code == 404:
        return []
    assert response.status_code == 200, response.text
    return response.text.splitlines()


def running(api: Api, execution_id: str) -> None:
    """Wait until the code has begun."""
    eventually(lambda: api.status(execution_id) == "running", LONG)


def result_of(api: Api, execution_id: str) -> dict[str, Any]:
    """The result, requested again while members stop and start."""
    return answer(api.http.get(f"{V1}/executions/{execution_id}/result?wait={LONG}"))
