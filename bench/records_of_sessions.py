"""Writes many records of sessions into the SQLite file of a server, as copies of a real one."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

from atoll import ids

if TYPE_CHECKING:
    from pathlib import Path

    from bench.simulated_pods import SimulatedPod

Row = dict[str, Any]


class SessionRecords:
    def __init__(self, file: Path) -> None:
        """`file` is the database of a server that has one session, which runs."""
        self._file = file
        with closing(sqlite3.connect(file)) as database:
            database.row_factory = sqlite3.Row
            session = "SELECT * FROM sessions WHERE status = 'running'"
            self._session: Row = dict(database.execute(session).fetchone())
            instance = "SELECT * FROM instances WHERE session_id IS NOT NULL"
            self._instance: Row = dict(database.execute(instance).fetchone())
            found = database.execute("SELECT value FROM properties WHERE name = 'cluster'")
            self.cluster: str = found.fetchone()[0]

    def clear(self) -> None:
        with closing(sqlite3.connect(self._file)) as database:
            database.execute("DELETE FROM sessions")
            database.execute("DELETE FROM instances")
            database.commit()

    def add_running(self, pods: list[SimulatedPod]) -> None:
        """A session for each pod."""
        sessions = [{"id": ids.session_id(), **self._of(pod)} for pod in pods]
        self._insert("sessions", [self._session | session for session in sessions])
        instances = [
            self._instance_of(pod) | {"session_id": session["id"]}
            for pod, session in zip(pods, sessions, strict=True)
        ]
        self._insert("instances", instances)

    def add_stopped(self, count: int) -> None:
        stopped = {
            "status": "stopped", "wanted": "stopped", "instance_id": None, "workspace": None,
            "timer_at": None, "unsettled_at": None, "rested_at": self._session["updated_at"],
        }  # fmt: skip
        rows = [self._session | stopped | {"id": ids.session_id()} for _ in range(count)]
        self._insert("sessions", rows)

    def add_ready(self, pods: list[SimulatedPod], holder: str) -> None:
        """An instance in the warm pool of a replica that is lost, for each pod."""
        free = {"session_id": None, "holder": holder}
        self._insert("instances", [self._instance_of(pod) | free for pod in pods])

    def _of(self, pod: SimulatedPod) -> Row:
        return {"instance_id": pod.instance_id, "workspace": json.dumps(pod.instance_id)}

    def _instance_of(self, pod: SimulatedPod) -> Row:
        handle = json.loads(self._instance["handle"])
        handle["instance_id"] = pod.instance_id
        handle["data"] |= {
            "pod": pod.name, "uid": pod.uid, "workspace": pod.instance_id,
            "certificate": pod.certificate,
        }  # fmt: skip
        mine = {"id": pod.instance_id, "handle": json.dumps(handle)}
        return {**self._instance, **mine, "workspace": json.dumps(pod.instance_id)}

    def _insert(self, table: str, rows: list[Row]) -> None:
        names = list(rows[0])
        values = ", ".join(f":{name}" for name in names)
        with closing(sqlite3.connect(self._file)) as database:
            database.executemany(
                f"INSERT INTO {table} ({', '.join(names)}) VALUES ({values})", rows
            )
            database.commit()
