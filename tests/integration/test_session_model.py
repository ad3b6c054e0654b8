"""
Whatever is requested of sessions, whatever fails on the node and however often control planes die:
afterwards each session has its wanted state and its files, and the node has exactly what they need.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from atoll.errors import AtollError, TemporaryError
from atoll.model import plan
from atoll.model.execution import ExecutionStatus, Language, Request
from atoll.model.instance import State
from atoll.model.plan import Step
from atoll.model.session import Session, SessionStatus, Wanted
from atoll.reconcile.orphaned_instances import ORPHAN_AGE
from atoll.service.sessions.new_session import NewSession
from atoll.service.sessions.records import instance_lease
from atoll.service.sessions.update import SessionChange
from tests.integration.troubled import KINDS, METHODS, Replica, World, kill

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from tests.parts import Parts

PATIENCE = 0.3
"""Seconds that an action waits for its result before the next one starts."""
QUIET = 60.0
"""Seconds within which everything settles once nothing goes wrong any more."""
HOURS = 3600
EXAMPLES = (2, 17, 107, 116)
"""Stories in which something went wrong once."""

Action = tuple[Any, ...]

VERBS = ("start", "stop", "archive", "pause")
CHANGES = ("want",) * 6 + ("execute",) * 4 + ("patch", "delete", "clone")
ACTIONS = {
    "change": 50, "fault": 18, "lift": 4, "kill": 8, "restart": 3, "crash": 3, "advance": 4,
    "sweep": 3, "together": 7,
}  # fmt: skip
"""How often each comes in a hundred."""


def story(number: int) -> list[Action]:
    """What happens, the same for the same number."""
    chance = random.Random(number)
    return [_action(chance) for _ in range(chance.randint(8, 22))]


def _change(chance: random.Random) -> Action:
    name = chance.choice(CHANGES)
    given = (name, chance.randrange(3), chance.randrange(2))
    return (*given, chance.choice(VERBS)) if name == "want" else given


def _action(chance: random.Random) -> Action:
    (name,) = chance.choices(list(ACTIONS), list(ACTIONS.values()))
    match name:
        case "change":
            return _change(chance)
        case "fault":
            return (name, chance.choice(METHODS), chance.choice(KINDS), chance.randint(1, 5))
        case "kill":
            return (name, chance.randrange(3))
        case "crash" | "sweep":
            return (name, chance.randrange(2))
        case "advance":
            return (name, chance.choice((1, 70, 6 * HOURS)))
        case "together":
            return (name, [_change(chance) for _ in range(chance.randint(2, 4))])
    return (name,)


@dataclasses.dataclass
class Known:
    """A session as its clients know it."""

    id: str
    wanted: set[Wanted] = dataclasses.field(default_factory=lambda: {Wanted.RUNNING})
    """What may be wanted of it now."""
    files: set[str] = dataclasses.field(default_factory=set)
    """Written for sure."""
    waits: bool = False
    """Whether work was accepted that had not ended when it was last looked at: it may start it."""
    deleted: bool = False


class Life:
    """A world, the requests in it, and the expected results."""

    def __init__(self, place: Path) -> None:
        self.world = World(place)
        self.known: dict[int, Known] = {}
        self.clones: list[Known] = []
        self.written = 0
        self.refused: dict[str, int] = {}

    def replica(self, number: int) -> Replica:
        return self.world.replicas[number % len(self.world.replicas)]

    async def act(self, action: Action) -> None:
        name, *given = action
        await getattr(self, name)(*given)

    async def _tried(self, work: Awaitable[Any], seconds: float = 10.0) -> Any:
        """
        The result; None if the request was refused or takes too long. No other error may occur.
        """
        try:
            async with asyncio.timeout(seconds):
                return await work
        except AtollError as error:
            self.refused[error.code] = self.refused.get(error.code, 0) + 1
        except TimeoutError:
            self.refused["late"] = self.refused.get("late", 0) + 1
        return None

    # Actions

    async def _slot(self, slot: int, replica: int) -> Known | None:
        known = self.known.get(slot)
        if known is not None and not known.deleted:
            return known
        fields = {"idle_timeout": 5 * HOURS, "archive_after": 5 * HOURS} if slot == 2 else {}
        made = await self._tried(
            self.replica(replica).parts.sessions.create(NewSession(_unchanged, fields=fields))
        )
        if made is None:
            return None
        self.known[slot] = Known(made.id)
        return self.known[slot]

    async def want(self, slot: int, replica: int, verb: str) -> None:
        known = await self._slot(slot, replica)
        if known is None:
            return
        sessions = self.replica(replica).parts.sessions
        await self._tried(getattr(sessions, verb)(known.id, wait=PATIENCE))
        # Refused or not: it may have been written down before.
        await self._note(known)

    async def _note(self, known: Known) -> None:
        session = await self._stored(known.id)
        known.wanted = {session.wanted}

    async def execute(self, slot: int, replica: int) -> None:
        known = await self._slot(slot, replica)
        if known is None:
            return
        executions = self.replica(replica).parts.executions
        self.written += 1
        name = f"f{self.written}"
        request = Request(
            code=f"with open({name!r}, 'w') as file: file.write({name!r})",
            language=Language.PYTHON,
            timeout=20,
        )
        late = self.refused.get("late")
        running = await self._tried(executions.submit(known.id, request))
        if running is None:
            # What took too long may have been accepted all the same.
            known.waits = known.waits or self.refused.get("late") != late
        else:
            ended = await self._tried(executions.await_end(running, 3.0))
            if ended is not None and ended.status is ExecutionStatus.COMPLETED:
                known.files.add(name)
            known.waits = known.waits or ended is None or not ended.status.ended
        await self._note(known)

    async def patch(self, slot: int, replica: int) -> None:
        known = await self._slot(slot, replica)
        if known is not None:
            self.written += 1
            labels: dict[str, str | None] = {"number": str(self.written)}
            change = SessionChange(_unchanged, labels=labels)
            sessions = self.replica(replica).parts.sessions
            changed = await self._tried(sessions.update(known.id, change))
            if changed is not None:
                assert changed.labels == labels

    async def delete(self, slot: int, replica: int) -> None:
        known = self.known.get(slot)
        if known is not None:
            ended = await self._tried(self.replica(replica).parts.sessions.delete(known.id))
            known.deleted = known.deleted or ended is not None

    async def clone(self, slot: int, replica: int) -> None:
        known = self.known.get(slot)
        if known is None or known.deleted or len(self.clones) > 2:
            return
        files = set(known.files)
        sessions = self.replica(replica).parts.sessions
        made = await self._tried(sessions.clone(known.id, SessionChange(_unchanged)))
        if made is not None:
            self.clones.append(Known(made.id, files=files))
        await self._note(known)

    async def fault(self, method: str, kind: Any, times: int) -> None:
        self.world.trouble.set(method, kind, times)

    async def lift(self) -> None:
        self.world.trouble.lift()

    async def kill(self, slot: int) -> None:
        known = self.known.get(slot)
        if known is None:
            return
        session = await self._stored(known.id)
        for handle in await self.world.replicas[0].driver.handles():
            if handle.instance_id == session.instance_id:
                kill(handle)

    async def restart(self) -> None:
        self.world.trouble.lift()  # Else it does not come up, which is another story.
        await self.world.restart()

    async def crash(self, replica: int) -> None:
        if len(self.world.replicas) > 1:
            await self.world.crash(self.replica(replica))
            await self.world.join()

    async def advance(self, seconds: int) -> None:
        self.world.clock.ahead += seconds

    async def sweep(self, replica: int) -> None:
        await self._tried(self.replica(replica).orphans.once())

    async def together(self, given: list[Action]) -> None:
        before = {slot: set(known.wanted) for slot, known in self.known.items()}
        results = await asyncio.gather(
            *(self.act(action) for action in given), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        for slot, known in self.known.items():
            known.wanted |= before.get(slot, set()) | set(Wanted)

    # What must be

    async def _stored(self, session_id: str) -> Session:
        session = await self.world.replicas[0].parts.store.sessions.get(session_id)
        assert session is not None
        return session

    async def _sessions(self) -> list[Session]:
        store = self.world.replicas[0].parts.store
        return list((await store.sessions.page(limit=200)).items)

    async def settle(self) -> None:
        """Until there is nothing to do; time goes by in leaps, so that what waits comes."""
        self.world.trouble.lift()
        deadline = time.monotonic() + QUIET
        while True:
            unsettled = [
                (item.id, item.wanted, item.status, item.retry_at, item.message)
                for item in await self._sessions()
                if plan.next_step(item) is not Step.NONE
            ]
            busy = sum(replica.parts.runner.count for replica in self.world.replicas)
            if not unsettled and not busy and not self.world.leases:
                return
            assert time.monotonic() < deadline, (unsettled, busy, self.world.leases)
            self.world.clock.ahead += 61
            await asyncio.sleep(0.1)

    async def check(self) -> None:
        await self.settle()
        for known in [*self.known.values(), *self.clones]:
            session = await self._stored(known.id)
            if known.deleted:
                assert session.status.ended, session
                assert (session.instance_id, session.workspace) == (None, None)
                continue
            assert not session.status.ended, session
            wanted = known.wanted | ({Wanted.RUNNING} if known.waits else set())
            assert session.wanted in wanted or session.idle_timeout is not None, session
            _check_consistent(session)
        await self._use_all()
        await self.settle()
        await self._check_node()

    async def _use_all(self) -> None:
        """Each session runs after a request for its files; a killed one is replaced by that."""
        for number, known in enumerate([*self.known.values(), *self.clones]):
            if known.deleted:
                continue
            parts = self.replica(number).parts
            code = "import os\nprint(*sorted(os.listdir()))\n" + "".join(
                f"assert open({name!r}).read() == {name!r}\n" for name in sorted(known.files)
            )
            request = Request(code=code, language=Language.PYTHON, timeout=20)
            running = await parts.executions.submit(known.id, request)
            ended = await parts.executions.await_end(running, 20)
            assert ended.status is ExecutionStatus.COMPLETED, (ended, await self._stored(known.id))
            session = await self._stored(known.id)
            assert (session.status, session.wanted) == (SessionStatus.RUNNING, Wanted.RUNNING)
            _check_consistent(session)

    async def _check_node(self) -> None:
        for _ in range(3):
            await self.world.replicas[0].orphans.once()
            self.world.clock.ahead += ORPHAN_AGE + 1
        driver, store = self.world.replicas[0].driver, self.world.replicas[0].parts.store
        sessions = [item for item in await self._sessions() if not item.status.ended]
        handles = {handle.instance_id: handle for handle in await driver.handles()}
        instances = {item.id: item for item in await store.instances.all()}
        assert set(handles) == set(instances) == {item.instance_id for item in sessions} - {None}
        assert set(await driver.workspaces.names()) == {item.workspace for item in sessions} - {
            None
        }
        for session in sessions:
            if session.status is SessionStatus.RUNNING:
                assert session.instance_id is not None
                instance = instances[session.instance_id]
                assert (instance.session_id, instance.workspace) == (session.id, session.workspace)
                assert (await driver.observe(handles[instance.id])).state is State.RUNNING
        assert not self.world.leases
        for item in (await store.executions.page(limit=500)).items:
            assert item.status.ended, item


def _check_consistent(session: Session) -> None:
    if session.status.stopped_or_archived:
        assert (session.rested_at is not None, session.instance_id) == (True, None), session
    if session.status in (SessionStatus.RUNNING, SessionStatus.PAUSED):
        assert session.rested_at is None, session
        assert session.instance_id is not None, session
        assert session.workspace is not None, session
    if session.status is SessionStatus.STOPPED:
        assert session.workspace is not None or session.wanted is not Wanted.RUNNING
    if session.status is SessionStatus.ARCHIVED:
        assert session.workspace is None, session
    assert (session.failures, session.retry_at) == (0, None), session


def _unchanged(resources: Any) -> Any:
    return resources


async def live(given: list[Action], size: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory(prefix="atoll-model-") as directory:
        life = Life(Path(directory))
        try:
            await life.world.start(size)
            for action in given:
                await life.act(action)
            await life.check()
        finally:
            await life.world.clear()
    return {**life.refused, **life.world.trouble.hit}


def played(number: int) -> None:
    given = story(number)
    with capture_logs() as logs:
        trace = asyncio.run(live(given, 1 + number % 2))
    mistakes = [entry for entry in logs if entry["log_level"] == "error"]
    assert not mistakes, mistakes
    print(number, len(given), "actions", trace)


numbers = st.integers(0, 2**32 - 1)


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    # Each example takes seconds: the first failure is reported without shrinking.
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
@example(number=EXAMPLES[0])
@example(number=EXAMPLES[1])
@example(number=EXAMPLES[2])
@example(number=EXAMPLES[3])
@given(number=numbers)
def test_sessions_reach_their_wanted_state_after_random_faults(
    bubblewrap: str, number: int
) -> None:
    played(number)


@pytest.mark.parametrize("size", [1, 2])
def test_sessions_reach_their_wanted_state_after_new_random_faults(
    bubblewrap: str, size: int
) -> None:
    number = 2 * random.randrange(2**31) + size - 1
    print("number", number)
    played(number)


# Ways that went wrong once


@pytest.fixture
async def world(bubblewrap: str, tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    try:
        await made.start()
        yield made
    finally:
        await made.clear()


async def new(parts: Parts, **fields: Any) -> Session:
    return await parts.sessions.create(NewSession(_unchanged, fields=fields))


@pytest.mark.anyio
async def test_a_stop_revoked_before_it_began_leaves_no_trace(world: World) -> None:
    parts = world.replicas[0].parts
    session = await new(parts)
    async with parts.leases.lease(instance_lease(session.id), parts.leases.new_owner()):
        stopping = await parts.sessions.stop(session.id, wait=0)
        assert (stopping.wanted, stopping.status) == (Wanted.STOPPED, SessionStatus.RUNNING)
        await parts.sessions.start(session.id, wait=0)
    running = await parts.sessions.start(session.id, wait=10)

    _check_consistent(running)
    assert running.status is SessionStatus.RUNNING
    assert running.instance_id == session.instance_id
    # Its life ends, as that of all that run.
    assert plan.timer(running) is not None


@pytest.mark.anyio
async def test_leftovers_of_a_dead_control_plane_are_removed_before_the_next_start(
    world: World,
) -> None:
    parts, driver = world.replicas[0].parts, world.replicas[0].driver
    session = await new(parts)
    stopped = await parts.sessions.stop(session.id, wait=10)
    left = await parts.connections._instances.make(stopped)  # And then it died.
    left.link.close()
    running = await parts.sessions.start(session.id, wait=20)

    assert running.status is SessionStatus.RUNNING
    assert [handle.instance_id for handle in await driver.handles()] == [running.instance_id]
    assert [item.id for item in await parts.store.instances.all()] == [running.instance_id]


@pytest.mark.anyio
async def test_a_hanging_driver_call_delays_no_other_session(world: World) -> None:
    parts = world.replicas[0].parts
    session = await new(parts)
    live = await parts.starter.connect(session.id)
    world.trouble.set("observe", "hang", 100)
    # A connected instance is used without a check.
    world.clock.ahead += 10
    assert await parts.starter.connect(session.id) is live
    live.link.close()
    async with asyncio.timeout(20):
        with pytest.raises(TemporaryError) as refused:
            await parts.starter.connect(session.id)
    assert refused.value.code == "session_not_ready"
    world.trouble.lift()
    assert (await parts.starter.connect(session.id)).instance.id == session.instance_id


@pytest.mark.anyio
async def test_a_session_without_its_instance_can_be_changed(world: World) -> None:
    parts = world.replicas[0].parts
    session = await new(parts)
    assert session.instance_id is not None
    parts.connections.disconnect(session.id)
    await parts.connections._instances.remove(session.instance_id)
    async with asyncio.timeout(20):
        changed = await parts.sessions.update(
            session.id, SessionChange(_unchanged, labels={"a": "b"})
        )
        assert changed.labels == {"a": "b"}
        stopped = await parts.sessions.stop(session.id, wait=10)
    assert (stopped.status, stopped.instance_id) == (SessionStatus.STOPPED, None)
