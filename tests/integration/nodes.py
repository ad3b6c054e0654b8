"""
A fleet of several nodes: `atoll serve` processes with their own data directories, on one database,
one Redis and one bucket.

Nodes are started, stopped, killed and suspended individually. When the fleet ends, it checks that
no node has leftovers, no process runs, and no node logged an error.
"""

from __future__ import annotations

import asyncio
import sqlite3
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Self

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from tests import preloaded
from tests.e2e.api import V1, Api, answer, eventually
from tests.integration.replicas import DRIVERS, LEASE, LONG, MARK, PRESENCE, Member
from tests.servers.redis import RedisServer

PROBE = 0.3
"""Seconds between two probes."""


class FleetNode(Member):
    """A node with one control plane."""

    @property
    def key(self) -> str:
        return self._env["ATOLL_API_KEY"]

    @property
    def id(self) -> str:
        return (self.data_dir / "node-id").read_text().strip()

    def instances(self) -> set[str]:
        return {path.name for path in (self.data_dir / "node" / "instances").iterdir()}

    def workspaces(self) -> set[str]:
        return {path.name for path in (self.data_dir / "node" / "workspaces").iterdir()}


class Fleet:
    def __init__(
        self,
        place: Path,
        *,
        size: int = 2,
        database_url: str | None = None,
        blobs: dict[str, str] | None = None,
        of_node: Callable[[int], dict[str, str]] = lambda number: {},
        **env: str,
    ) -> None:
        """
        `database_url` is one SQLite file for all unless given; `blobs` is the environment that
        names the bucket, without which every node has its own; `of_node` is what one node has for
        itself.
        """
        self.redis = RedisServer(place)
        self._sqlite = place / "fleet.db"
        self.database_url = database_url
        self._mark = uuid.uuid4().hex
        self._env = {
            MARK: self._mark,
            "ATOLL_REDIS_URL": self.redis.url,
            "ATOLL_DATABASE_URL": database_url or f"sqlite:///{self._sqlite}",
            "ATOLL_API_KEY": uuid.uuid4().hex,
            "ATOLL_COORDINATION__PRESENCE_TTL": str(PRESENCE),
            "ATOLL_COORDINATION__LEASE_TTL": str(LEASE),
            "ATOLL_SHUTDOWN_TIMEOUT": "5",
            "ATOLL_POOL__SIZE": "0",
            # Otherwise each workspace is an image, which is slow to make and irrelevant here.
            "ATOLL_SESSION__DISK": str(16 * 2**20),
            "ATOLL_SESSION__SWEEP": "1",
            "ATOLL_SECRETS__KEY": "42" * 32,
            "ATOLL_NODE__PROBE": str(PROBE),
            "ATOLL_NODE__PROBE_TIMEOUT": "5",
            "ATOLL_NODE__MAX_SESSIONS": "1000",
            **(blobs or {}),
            **env,
        }
        self.nodes = []
        for number in range(size):
            data_dir = place / f"node-{number}"
            data_dir.mkdir()
            own = {**self._env, **of_node(number)}
            self.nodes.append(FleetNode(data_dir, f"node-{number}", **own))

    def __getitem__(self, number: int) -> FleetNode:
        return self.nodes[number]

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def key(self) -> str:
        return self._env["ATOLL_API_KEY"]

    def start(self) -> Self:
        """Start all stopped nodes concurrently."""
        with ThreadPoolExecutor(len(self.nodes)) as threads:
            list(threads.map(FleetNode.start, [one for one in self.nodes if not one.up]))
        return self

    def __enter__(self) -> Self:
        self.redis.start()
        try:
            if self.database_url is not None:
                self.command("db", "upgrade")
            self.nodes[0].start()  # Alone: it makes the tables where that is a file.
            self.start()
            eventually(lambda: len(self.nodes_by_id(self.nodes[0].api)) == len(self.nodes), LONG)
            return self
        except BaseException:
            self._abandon()
            raise

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._abandon()
            return
        try:
            self.end()
        except BaseException:
            self._abandon()
            raise
        self.redis.stop()
        logged = {one.name: one.errors() for one in self.nodes if one.errors()}
        assert not logged, logged

    def end(self) -> None:
        """End all sessions, then stop all; nothing may be there after it."""
        self.start()
        for row in self.rows("SELECT id FROM sessions WHERE ended_at IS NULL"):
            self.at(row["id"]).http.delete(f"{V1}/sessions/{row['id']}")
        eventually(lambda: not any(one.instances() for one in self.nodes), LONG)
        eventually(lambda: not any(one.workspaces() for one in self.nodes), LONG)
        for one in self.nodes:
            assert one.stop() == 0, one.name
        eventually(lambda: not self.processes(), LONG)

    def _abandon(self) -> None:
        """Stop everything after a failed test, whatever its state."""
        for one in self.nodes:
            if one.up:
                one.kill()
        if self.redis.process is None:
            self.redis.start()
        for one in self.nodes:
            with suppress(Exception):
                FleetNode(one.data_dir, "last", "--stop-sessions", **self._env).start().stop()
        self.redis.kill()

    def command(self, *arguments: str, url: str | None = None) -> str:
        """A command with the fleet's settings; what it prints."""
        own = {"ATOLL_DATA_DIR": str(self.nodes[0].data_dir)}
        if url is not None:
            own["ATOLL_URL"] = url
        done = preloaded.run(*arguments, env=self._env | own)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # Queries

    @staticmethod
    def nodes_by_id(api: Api) -> dict[str, dict[str, Any]]:
        """The nodes as the API of a control plane lists them, by id."""
        return {item["id"]: item for item in answer(api.http.get(f"{V1}/nodes"))["items"]}

    def node_of(self, session_id: str) -> FleetNode:
        """The node that a session is on."""
        (row,) = self.rows("SELECT runtime_node FROM sessions WHERE id = :id", id=session_id)
        return next(one for one in self.nodes if one.id == row["runtime_node"])

    def create_on(self, node: FleetNode, **fields: Any) -> str:
        """A session that is placed on this node although others would fit."""
        others = [one.id for one in self.nodes if one is not node]
        for other in others:
            answer(node.api.http.post(f"{V1}/nodes/{other}/cordon"))
        made: list[str] = []

        def is_on_node() -> bool:
            made.append(node.api.create(**fields)["id"])
            return self.node_of(made[-1]) is node

        try:
            # The state of other nodes may be outdated.
            eventually(is_on_node, LONG)
        finally:
            for other in others:
                answer(node.api.http.post(f"{V1}/nodes/{other}/uncordon"))
            for session_id in made[:-1]:
                node.api.end(session_id)
        return made[-1]

    def at(self, session_id: str) -> Api:
        """A control plane of the session's node."""
        return self.node_of(session_id).api

    def session(self, session_id: str) -> dict[str, Any]:
        return self.at(session_id).get(session_id)

    def wait_for_move(self, session_id: str, left: FleetNode) -> FleetNode:
        eventually(lambda: self.node_of(session_id) is not left, LONG)
        return self.node_of(session_id)

    def rows(self, statement: str, **values: object) -> list[dict[str, Any]]:
        if self.database_url is None:
            with closing(sqlite3.connect(self._sqlite, timeout=LONG)) as connection:
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

    def processes(self) -> list[int]:
        """What was started by this fleet and runs."""
        mark = f"{MARK}={self._mark}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return found
