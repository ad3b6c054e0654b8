"""Servers and instances that a plan disturbs."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tests import drivers
from tests.e2e.api import eventually
from tests.e2e.chaos import code, processes
from tests.e2e.chaos.history import Done, History
from tests.e2e.chaos.plan import LOSES_INSTANCE, Fault, Kind, Plan
from tests.integration.replicas import Cluster, Member, lines

SETTINGS = {
    "ATOLL_SHUTDOWN_TIMEOUT": "2",
    "ATOLL_EXECUTION__RETRY_BACKOFF": "0.2",
    "ATOLL_EXECUTION__RETRY_MAX_BACKOFF": "1",
    "ATOLL_EXECUTION__CANCEL_GRACE": "0.3",
    "ATOLL_LINK__HEARTBEAT": "0.3",
    "ATOLL_LINK__LOST_AFTER": "1.5",
    "ATOLL_LINK__CONNECT_TIMEOUT": "1.5",
}
GLANCE = 0.02
"""Seconds."""
BROKEN = re.compile(r"Traceback|execution\.internal_error|\[(error|critical) ")
"""Strings that no log may contain."""

EXPECTED = "graceful shutdown exceeded"
"""Uvicorn's word for requests that waited when a server ended."""


class World(Cluster):
    recovery = 30.0
    """Seconds after the last fault within which all jobs must have ended."""
    ending = 15.0
    """Seconds for an instance to end, including time while its executor is suspended."""

    def __init__(self, place: Path, plan: Plan, history: History, *, size: int = 1) -> None:
        super().__init__(place, size=size, with_redis=size > 1, **SETTINGS)
        self._history = history
        self._standing: set[asyncio.Task[None]] = set()
        self.sessions: list[str] = []
        self._capacities = plan.capacities
        self._began = time.monotonic()
        self._away = 0.0
        self._down = False

    def make_sessions(self) -> None:
        self.sessions = [
            str(self[0].api.create(capacity=capacity, timeout=3600, **self.session_fields())["id"])
            for capacity in self._capacities
        ]

    def session_fields(self) -> dict[str, Any]:
        return {}

    @property
    def witness(self) -> tuple[str, int] | None:
        """Where code sends its tokens, too."""
        return None

    def files(self) -> list[str]:
        """The tokens in the workspace of each session."""
        return ["\n".join(lines(self[0].api, session, code.FILE)) for session in self.sessions]

    def tokens(self, files: list[str]) -> list[str]:
        """All tokens that code of each session has written."""
        return files

    def complaints(self) -> list[str]:
        return [
            f"{member.name} logged: {entry}"
            for member in self.members
            # An entry begins with its time, and a traceback follows it.
            for entry in re.split(r"\n(?=\d{4}-\d\d-\d\dT)", member.stderr())
            if BROKEN.search(entry) and EXPECTED not in entry
        ]

    def check_instances(self) -> None:
        """Each instance on the node is a session's, or waits in the pool."""
        if len(self) > 1:
            # Leftovers of a killed server are removed when a single server starts.
            self.check_node()
            return
        eventually(lambda: self.instances() == set(self._known()))
        for instance_id, session in self._known().items():
            assert session is None or session in self.sessions, (instance_id, session)

    def _known(self) -> dict[str, str | None]:
        rows = self.rows("SELECT id, session_id FROM instances")
        return {row["id"]: row["session_id"] for row in rows}

    # Time

    def start_clock(self) -> None:
        """Start the clock of the plan. It is stopped while no server runs."""
        self._began = time.monotonic()

    async def until(self, seconds: float) -> None:
        while True:
            left = self._began + self._away + seconds - time.monotonic()
            if left <= 0 and not self._down:
                return
            await asyncio.sleep(GLANCE if self._down else min(left, GLANCE))

    # Faults

    async def suffer(self, plan: Plan) -> None:
        """Inject all faults of the plan; finally all servers run and no process is suspended."""
        for fault in plan.faults:
            await self.until(fault.at)
            await self._inflict(fault)
        await asyncio.gather(*self._standing)

    async def _inflict(self, fault: Fault) -> None:
        member = self.members[fault.member]
        self._history.note(f"-- {fault.kind} ({member.name}, session {fault.session})")
        if fault.kind is Kind.STOP_EXECUTOR:
            self._in_background(self._freeze(fault))
        elif fault.kind is Kind.END_EXECUTOR:
            self._in_background(self._end_instance(fault))
        elif fault.kind is Kind.KILL_STARTER and fault.kind in LOSES_INSTANCE:
            self._in_background(self._end_instance(fault, "pid", signal.SIGKILL))
        elif fault.kind in (Kind.KILL_SERVER, Kind.END_SERVER, Kind.KILL_BOTH):
            await self._restart(member, fault)
        else:
            self._hit(fault)

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._standing.add(task)
        task.add_done_callback(self._standing.discard)

    async def _restart(self, member: Member, fault: Fault) -> None:
        began = time.monotonic_ns()
        self._down = len(self.members) == 1
        if fault.kind is Kind.END_SERVER:
            code = await asyncio.to_thread(member.stop)
            if code != 0:
                self._history.odd.append(f"{member.name} ended with {code} after SIGTERM")
        else:
            await asyncio.to_thread(member.kill)
        self._history.note(f"-- {member.name} is down")
        await asyncio.sleep(fault.seconds)
        if fault.kind is Kind.KILL_BOTH:
            self._hit(fault)
        await asyncio.to_thread(member.start)
        if self._down:
            self._away += (time.monotonic_ns() - began) / 1e9
            self._down = False
        self._history.note(f"-- {member.name} is up")
        self._record(fault, None, began)

    def _hit(self, fault: Fault) -> None:
        began = time.monotonic_ns()
        instance_id = self._instance(fault.session)
        handle = self._handle(instance_id)
        if instance_id is None or handle is None:
            self._history.note("-- there was no instance to hit")
            return
        child = (handle["child"], handle["child_started"])
        starter = (handle["pid"], handle["started"])
        acts: dict[Kind, Callable[[], object]] = {
            Kind.KILL_BOTH: lambda: processes.send(*child, signal.SIGKILL),
            Kind.KILL_EXECUTOR: lambda: processes.send(*child, signal.SIGKILL),
            Kind.KILL_STARTER: lambda: processes.send(*starter, signal.SIGKILL),
            Kind.KILL_INSTANCE: lambda: [
                processes.send(*one, signal.SIGKILL) for one in (starter, child)
            ],
            Kind.KILL_ZYGOTE: lambda: self._kill_zygote(child[0]),
            Kind.CUT_LINK: lambda: processes.cut_links(child[0]),
        }
        came_of_it = acts[fault.kind]()
        self._history.note(f"-- in {instance_id}: {came_of_it}")
        self._record(fault, instance_id, began)

    async def _end_instance(
        self, fault: Fault, target: str = "child", number: int = signal.SIGTERM
    ) -> None:
        """Signal until the instance ends: it may be suspended now and receive the signal later."""
        began = time.monotonic_ns()
        instance_id = self._instance(fault.session)
        handle = self._handle(instance_id)
        if handle is None:
            return
        child = (handle["child"], handle["child_started"])
        starter = (handle["pid"], handle["started"])
        if not processes.send(*(child if target == "child" else starter), number):
            return
        await self._await_end(str(instance_id), child)
        self._record(fault, instance_id, began)

    async def _await_end(self, instance_id: str, process: tuple[int, int]) -> None:
        deadline = time.monotonic() + self.ending
        while processes.started(process[0]) == process[1]:
            if time.monotonic() > deadline:
                self._history.odd.append(f"{instance_id} is being ended and does not end")
                break
            await asyncio.sleep(GLANCE)
        self._history.note(f"-- {instance_id} has ended")

    async def _freeze(self, fault: Fault) -> None:
        began = time.monotonic_ns()
        instance_id = self._instance(fault.session)
        child = self._executor(instance_id)
        if child is None:
            return
        processes.send(*child, signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            processes.send(*child, signal.SIGCONT)
        self._history.note(f"-- {instance_id} goes on after {fault.seconds} s")
        self._record(fault, instance_id, began)

    def _record(self, fault: Fault, instance_id: str | None, began: int) -> None:
        session = None if instance_id is None else fault.session
        done = Done(fault.kind, session, instance_id, began, time.monotonic_ns())
        self._history.faults.append(done)

    @staticmethod
    def _kill_zygote(init: int) -> bool:
        zygote = processes.zygote_of(init)
        return zygote is not None and processes.send(*zygote, signal.SIGKILL)

    def _instance(self, session: int) -> str | None:
        (row,) = self.rows(
            "SELECT instance_id FROM sessions WHERE id = :id", id=self.sessions[session]
        )
        return None if row["instance_id"] is None else str(row["instance_id"])

    def _executor(self, instance_id: str | None) -> tuple[int, int] | None:
        handle = self._handle(instance_id)
        return None if handle is None else (handle["child"], handle["child_started"])

    def _handle(self, instance_id: str | None) -> dict[str, int] | None:
        try:
            return drivers.handle(self.data_dir, str(instance_id))
        except FileNotFoundError:
            return None
