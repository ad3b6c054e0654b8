"""
Replicas are killed repeatedly while clients work: no accepted request is lost or handled twice.

The requests of the clients are derived from a seed. A client without a response repeats the
request, with the same key, at another member. Finally every received response agrees with the
database, with all members, and with the node.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.api import V1, eventually
from tests.integration.replicas import LONG, Cluster, Member, lines, note
from tests.servers.process import DatabaseServer

CLIENTS = 4
STEPS = 15
KILLS = 2
LASTING = 3
"""Sessions that are not deleted, so that all clients use the same ones."""
WORK = {"execute": 10, "submit": 10, "create": 3, "read": 5, "cancel": 3, "delete": 2}
AGAIN = frozenset(
    {"idempotency_in_flight", "coordination_unavailable", "session_not_ready", "lease_lost"}
)
"""Codes of responses with an unknown outcome: the request is repeated."""


@dataclass
class Seen:
    """Responses that all clients received."""

    sessions: list[str] = field(default_factory=list)
    deleted: set[str] = field(default_factory=set)
    executions: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The session and the token of each that was accepted."""
    cancelled: set[str] = field(default_factory=set)
    steps: int = 0
    story: list[str] = field(default_factory=list)
    """What was asked and answered, for the case that something is wrong in the end."""

    def reached(self, steps: float) -> bool:
        return self.steps >= steps


class Client:
    """A client that uses any member that answers."""

    def __init__(self, members: Sequence[Member], seen: Seen, name: str) -> None:
        self._members = members
        self._seen = seen
        self._name = name
        self._chance = random.Random(name)
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {members[0].key}"}, timeout=httpx.Timeout(30)
        )

    def work(self) -> None:
        kinds, weights = list(WORK), list(WORK.values())
        with self._http:
            for number in range(STEPS):
                (kind,) = self._chance.choices(kinds, weights)
                getattr(self, f"_{kind}")(f"{self._name}-{number}")
                self._seen.steps += 1

    def _request(self, method: str, path: str, key: str = "", **fields: Any) -> httpx.Response:
        """The first response with a known outcome."""
        answers: list[httpx.Response] = []
        headers = {"Idempotency-Key": key} if key else {}

        def responds() -> bool:
            member = self._chance.choice(self._members)
            try:
                response = self._http.request(
                    method, f"{member.url}{V1}/{path}", headers=headers, json=fields or None
                )
            except httpx.TransportError as error:
                self._seen.story.append(f"{key or path} {member.name}: {error!r}")
                return False
            answers.append(response)
            self._seen.story.append(f"{key or path} {member.name}: {response.text[:200]}")
            return response.is_success or response.json()["code"] not in AGAIN

        eventually(responds, LONG)
        return answers[-1]

    def _create(self, token: str) -> None:
        cold = self._chance.random() < 0.3
        fields = {"disk": "8Mi"} if cold else {"env_vars": {"TOKEN": token}}
        created = self._request("POST", "sessions", f"create-{token}", timeout=600, **fields)
        assert created.status_code == 201, created.text
        self._seen.sessions.append(created.json()["id"])

    def _execute(self, token: str, **fields: Any) -> None:
        session = self._chance.choice(self._seen.sessions)
        pause = f"import time\ntime.sleep({self._chance.choice([0, 0, 0.05, 0.5])})\n"
        path, code = f"sessions/{session}/execute", pause + note(token)
        fields = fields or {"wait": 20}
        sent = self._request("POST", path, f"execute-{token}", code=code, timeout=60, **fields)
        if sent.status_code == 409:
            assert sent.json()["code"] == "session_ended", sent.text
            assert session in self._seen.deleted or self._is_terminated(session)
            return
        assert sent.status_code in (200, 202), sent.text
        self._seen.executions[sent.json()["execution_id"]] = (session, token)

    def _is_terminated(self, session: str) -> bool:
        """Whether another client, which has not received the response yet, has deleted it."""
        return bool(self._request("GET", f"sessions/{session}").json()["status"] == "terminated")

    def _submit(self, token: str) -> None:
        self._execute(token, wait=0)

    def _read(self, token: str) -> None:
        session = self._chance.choice(self._seen.sessions)
        assert self._request("GET", f"sessions/{session}").status_code == 200
        assert self._request("GET", f"sessions/{session}/executions").status_code == 200
        for execution_id in list(self._seen.executions)[-2:]:
            assert self._request("GET", f"executions/{execution_id}").status_code == 200

    def _cancel(self, token: str) -> None:
        if self._seen.executions:
            execution_id = self._chance.choice(list(self._seen.executions))
            # Recorded before the request: its response may be lost although it is cancelled.
            self._seen.cancelled.add(execution_id)
            response = self._request("POST", f"executions/{execution_id}/cancel", f"cancel-{token}")
            assert response.status_code == 200 or response.json()["code"] == "execution_ended", (
                response.text
            )

    def _delete(self, token: str) -> None:
        if len(self._seen.sessions) > LASTING:
            session = self._chance.choice(self._seen.sessions[LASTING:])
            response = self._request("DELETE", f"sessions/{session}")
            assert response.json()["status"] == "terminated", response.text
            self._seen.deleted.add(session)


@pytest.fixture(params=["mariadb", "postgresql"])
def cluster(request: pytest.FixtureRequest, bubblewrap: str, tmp_path: Path) -> Iterator[Cluster]:
    server: DatabaseServer = request.getfixturevalue(request.param)
    with Cluster(tmp_path, size=3, database_url=server.new_database()) as found:
        yield found


def test_no_execution_is_lost_or_repeated_while_replicas_are_killed(cluster: Cluster) -> None:
    seen = Seen([str(cluster[0].api.create(timeout=600)["id"]) for _ in range(LASTING)])
    torment(cluster.members, seen, "three")
    assert cluster[2].stop() == 0
    torment(cluster.members[:2], seen, "two")

    cluster.check_settled()
    check_executions(cluster, seen)
    check_sessions(cluster, seen)
    cluster.check_node()


def torment(members: Sequence[Member], seen: Seen, seed: str) -> None:
    """Run clients, while one member after the other is killed and restarted."""
    chance = random.Random(seed)
    before = seen.steps
    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [Client(members, seen, f"{seed}-{number}") for number in range(CLIENTS)]
        working = [threads.submit(client.work) for client in clients]
        for number in range(KILLS):
            # Spread over what the clients do, and never after it.
            share = (number + chance.random()) / KILLS * 0.8 * CLIENTS * STEPS
            eventually(functools.partial(seen.reached, before + share), 2 * LONG)
            victim = chance.choice(members)
            victim.kill()
            victim.start()
        for done in working:
            done.result()


def check_executions(cluster: Cluster, seen: Seen) -> None:
    rows = {row["id"]: row for row in cluster.rows("SELECT * FROM executions")}
    # No execution without a response, although many were requested repeatedly.
    assert set(rows) == set(seen.executions)
    ran = {
        session: lines(cluster[0].api, session)
        for session in seen.sessions
        if session not in seen.deleted
    }
    for execution_id, (session, token) in seen.executions.items():
        status = rows[execution_id]["status"]
        if session in seen.deleted:
            assert status in ("completed", "cancelled"), (execution_id, status)
            continue
        count = ran[session].count(token)
        assert status == "completed" or execution_id in seen.cancelled, (execution_id, status)
        assert count == 1 if status == "completed" else count <= 1, (execution_id, status, count)
    tokens = [token for found in ran.values() for token in found]
    assert len(tokens) == len(set(tokens))
    assert set(tokens) <= {token for _, token in seen.executions.values()}


def check_sessions(cluster: Cluster, seen: Seen) -> None:
    rows = {row["id"]: row for row in cluster.rows("SELECT * FROM sessions")}
    extra = [rows[session] for session in rows if session not in seen.sessions]
    assert not extra, (extra, [line for line in seen.story if "create" in line])
    assert set(rows) == set(seen.sessions)
    for session, row in rows.items():
        wanted = "terminated" if session in seen.deleted else "running"
        assert row["status"] == wanted, (session, row)
        if session not in seen.deleted:
            result = cluster[0].api.run(session, "print(1)")
            assert result["stdout"] == "1\n"
