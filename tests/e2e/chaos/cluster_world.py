"""A world whose instances are pods. Their files end with them, unless a checkpoint has them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from atoll import ids
from atoll.reconcile import orphaned_instances
from tests import drivers
from tests.e2e.api import eventually
from tests.e2e.chaos.cluster_faults import ClusterFaults
from tests.e2e.chaos.history import History
from tests.e2e.chaos.plan import CONTROL_PLANE, MACHINES, PODS, Fault, Kind, Plan
from tests.e2e.chaos.witness import Witness
from tests.e2e.chaos.world import World

ORPHAN_AGE = 20.0
"""Seconds after which a pod is removed that a killed server has begun to make."""


class ClusterWorld(World):
    recovery = 90.0
    ending = 45.0

    def __init__(self, place: Path, plan: Plan, history: History, *, size: int = 1) -> None:
        super().__init__(place, plan, history, size=size)
        assert drivers.cluster is not None
        self._faults = ClusterFaults(drivers.cluster.cluster)
        self._witness = Witness(drivers.cluster.cluster.network.host)
        for member in self.members:
            member.with_constants({f"{orphaned_instances.__name__}.ORPHAN_AGE": ORPHAN_AGE})
        self._sessions_of = {job.number: job.session for job in plan.jobs}

    def __enter__(self) -> Self:
        self._witness.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            super().__exit__(*error)
        finally:
            self._witness.__exit__(*error)

    @property
    def witness(self) -> tuple[str, int]:
        return self._witness.address

    def session_fields(self) -> dict[str, Any]:
        # Otherwise files of finished executions may be lost too.
        return {"durability": "execution"}

    def check_instances(self) -> None:
        for session in self.sessions:
            # An instance that ended while nothing ran is replaced by the next request.
            assert self[0].api.run(session, "print(1)")["stdout"] == "1\n"
        try:
            eventually(lambda: self.instances() == set(self._known()), 3 * ORPHAN_AGE)
        except AssertionError:
            pods, known = self.instances(), self._known()
            raise AssertionError(f"pods: {pods}, recorded: {known}") from None

    def check_empty(self) -> None:
        """A pod that the last server has begun to make ends later (`executor.__main__`)."""

    def tokens(self, files: list[str]) -> list[str]:
        found: list[list[str]] = [[] for _ in self.sessions]
        for line in self._witness.lines():
            found[self._sessions_of[int(line.split()[0])]].append(line)
        return ["\n".join(lines) for lines in found]

    async def _inflict(self, fault: Fault) -> None:
        if fault.kind in PODS:
            self._in_background(self._remove_pod(fault))
        elif fault.kind in CONTROL_PLANE:
            self._in_background(self._fail_control_plane(fault))
        elif fault.kind in MACHINES:
            self._in_background(self._fail_machine(fault))
        else:
            await super()._inflict(fault)

    async def _remove_pod(self, fault: Fault) -> None:
        began = time.monotonic_ns()
        instance_id = self._instance(fault.session)
        executor = self._executor(instance_id)
        if instance_id is None or executor is None:
            return
        if await self._faults.remove_pod(fault.kind, ids.cluster_object_name(instance_id)):
            await self._await_end(instance_id, executor)
            self._record(fault, instance_id, began)

    async def _fail_control_plane(self, fault: Fault) -> None:
        began = time.monotonic_ns()
        if await self._faults.fail_control_plane(fault.kind, fault.seconds):
            self._history.note(f"-- {fault.kind}: it is back")
            self._record(fault, None, began)

    async def _fail_machine(self, fault: Fault) -> None:
        """The machine of the session's instance. What else runs there is lost with it."""
        began = time.monotonic_ns()
        instances = {session: self._instance(session) for session in range(len(self.sessions))}
        machines = {session: self._machine_of(one) for session, one in instances.items()}
        machine = machines[fault.session]
        if machine is None:
            return
        if await self._faults.fail_machine(fault.kind, machine, fault.seconds):
            self._history.note(f"-- {fault.kind}: {machine} is back")
            if fault.kind is not Kind.KILL_MACHINE:
                self._record(fault, None, began)
                return
            for session, there in machines.items():
                if there == machine:
                    self._record(replace(fault, session=session), instances[session], began)

    def _machine_of(self, instance_id: str | None) -> str | None:
        executor = self._executor(instance_id)
        return None if executor is None else self._faults.machine_of(executor[0])
