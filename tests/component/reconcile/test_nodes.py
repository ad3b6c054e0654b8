"""Nodes that do not answer, their sessions, and their recovery."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from atoll.drivers.base import NodeStatus
from atoll.drivers.local.driver import LocalDriver
from atoll.drivers.local.workspaces import LocalWorkspaces
from atoll.errors import Conflict, NotFound, PermanentError, TemporaryError, Unauthenticated
from atoll.model.event import Event
from atoll.model.node import Drain, Node, NodeHealth, NodeMetrics
from atoll.model.placement import PlacementRequest
from atoll.model.session import Cause, SessionStatus
from atoll.model.session_changes import WAITS_FOR_NODE
from atoll.model.volume import Volume, VolumeMount
from atoll.reconcile.drains import DrainReconciler
from atoll.reconcile.moved_sessions import MovedSessions
from atoll.reconcile.node_report import NodeReport
from atoll.reconcile.nodes import NodeMonitor
from atoll.service.nodes.local_node import LocalNode
from atoll.service.nodes.migration import Migrations
from atoll.service.nodes.probe import MAX_CLOCK_SKEW, NodeProbe
from atoll.service.nodes.service import Nodes
from atoll.service.packages.service import Packages
from atoll.service.placement.service import Placement
from atoll.service.pool.service import Pool
from atoll.service.templates.builds import Builds
from atoll.settings import BlobSettings, Settings
from tests.component.reconcile.test_strays import ManualClock
from tests.contract.stores.store_entities import (
    RESOURCES,
    make_execution,
    make_instance,
    make_session,
    make_template,
)
from tests.parts import ME, NODE, put_together

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from atoll.model.instance import Handle, Instance
    from atoll.model.session import Session
    from atoll.stores.stale_cache import CachingStore
    from tests.parts import Parts

pytestmark = pytest.mark.anyio

SECRET = "secret"
IDLE = NodeMetrics(0.1, 0.1, 10**12, 8, 2**36, 0.5)


class Machine(LocalDriver):
    """What this node is on, as the test has it."""

    def __init__(self, place: Path) -> None:
        settings = Settings(data_dir=place)
        super().__init__(place, settings.local, settings.link)
        self.trouble: str | None = None
        self.there: dict[str, Instance] = {}
        self.discarded: list[str] = []
        self.workspaces = MachineWorkspaces(self.discarded)

    async def status(self) -> NodeStatus:
        return NodeStatus(self.trouble, IDLE)

    async def handles(self) -> list[Handle]:
        return [instance.handle for instance in self.there.values()]

    async def destroy(self, handle: Handle) -> None:
        self.there.pop(handle.instance_id, None)


class MachineWorkspaces(LocalWorkspaces):
    def __init__(self, discarded: list[str]) -> None:
        self.discarded = discarded

    async def discard(self, name: str) -> None:
        self.discarded.append(name)


class Neighbour:
    """The control plane of another node: it responds as configured, or not at all."""

    def __init__(self, node_id: str, probing: NodeProbe) -> None:
        self.id = node_id
        self.answers = True
        self.problem: str | None = None
        self.says_it_is = node_id
        self.asked = 0
        self._probing = probing

    async def __aenter__(self) -> Neighbour:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        if self.answers:
            self.asked += 1
            assert asked[0] == "GET /internal/node HTTP/1.1"
            (token,) = (line[22:] for line in asked if line.startswith("Authorization: Bearer "))
            self._probing.verify(token, self.id)
            body = json.dumps({"id": self.says_it_is, "problem": self.problem}).encode()
            status = "200 OK" if self.problem is None else "503 Service Unavailable"
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            await writer.drain()
        writer.close()


@dataclass
class Environment:
    parts: Parts
    clock: ManualClock
    machine: Machine
    store: CachingStore
    nodes: Nodes
    placements: Placement
    moves: Migrations
    probe: NodeMonitor
    moved: MovedSessions
    neighbours: dict[str, Neighbour]

    async def node(self, node_id: str) -> Node:
        found = await self.store.nodes.get(node_id)
        assert found is not None
        return found

    async def session(self, session_id: str) -> Session:
        found = await self.store.sessions.get(session_id)
        assert found is not None
        return found

    async def probes(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.time += timedelta(seconds=10)
            await self.nodes.report()
            await self.probe.once()

    async def add(self, node_id: str, **options: Any) -> Session:
        session = make_session(
            runtime_node=node_id,
            template_version=1,
            expires_at=self.clock.now() + timedelta(hours=9),
            **options,
        )
        await self.store.sessions.add(session)
        return session


def builds(found: Parts, machine: Machine) -> Builds:
    packages = Packages(
        machine, found.leases, found.replica.clock, found.settings.packages, SECRET, NODE
    )
    return Builds(found.replica, machine, found.templates, packages, found.settings.template)


@asynccontextmanager
async def environment(place: Path, *others: str, shared: bool = True) -> AsyncIterator[Environment]:
    """This node and others, of which one reports on request."""
    clock, machine = ManualClock(), Machine(place)
    async with AsyncExitStack() as stack:
        found = put_together(place, clock, driver=machine)
        stack.push_async_callback(found.close)
        await found.open()
        blob = BlobSettings(url="s3://bucket/x") if shared else BlobSettings()
        settings = found.settings.model_copy(update={"blob": blob})
        building = builds(found, machine)
        pool = Pool(found.replica, machine)
        local = LocalNode(found.replica, machine, building, pool, settings, "http://127.0.0.1:1")
        nodes = Nodes(found.replica, local)
        placements = Placement(found.store, found.templates, clock, settings.node, NODE, dict)
        moves = Migrations(found.replica, placements, found.records)
        probing = NodeProbe(SECRET, clock, timedelta(seconds=60))
        probe = NodeMonitor(found.replica, nodes, probing, moves, settings.node)
        neighbours = {}
        await found.store.templates.add(make_template(id="python"))
        for node_id in others:
            neighbour = await stack.enter_async_context(Neighbour(node_id, probing))
            neighbours[node_id] = neighbour
            await found.store.nodes.report(
                Node(
                    node_id,
                    "local",
                    neighbour.url,
                    shared_blobs=shared,
                    metrics=IDLE,
                    templates=("python@1",),
                    seen_at=clock.now(),
                )
            )
        await nodes.report()
        moved = MovedSessions(found.replica, machine, found.connections, found.runner)
        yield Environment(
            found,
            clock,
            machine,
            found.store,
            nodes,
            placements,
            moves,
            probe,
            moved,
            neighbours,
        )


# Probes


async def test_a_node_that_fails_three_times_in_a_row_is_lost_until_it_answers(
    tmp_path: Path,
) -> None:
    async with environment(tmp_path, "b") as found:
        b = found.neighbours["b"]
        await found.probes(2)
        assert b.asked == 2
        assert (await found.node("b")).failures == 0
        b.answers = False
        await found.probes(2)
        assert ((await found.node("b")).status, (await found.node("b")).failures) == (
            NodeHealth.HEALTHY,
            2,
        )
        b.answers = True
        await found.probes()
        assert (await found.node("b")).failures == 0, "in a row"
        b.answers = False
        await found.probes(3)
        lost = await found.node("b")
        assert (lost.status, lost.failures) == (NodeHealth.UNHEALTHY, 3)
        assert "no answer" in (lost.problem or "")
        await found.probes(2)
        assert (await found.node("b")).failures == 5
        b.answers = True
        await found.probes()
        back = await found.node("b")
        assert (back.status, back.failures, back.problem) == (NodeHealth.HEALTHY, 0, None)


async def test_a_node_that_reports_a_problem_is_unhealthy(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        found.neighbours["b"].problem = "no space left"
        await found.probes(3)
        lost = await found.node("b")
        assert (lost.status, lost.problem) == (NodeHealth.UNHEALTHY, "no space left")


async def test_another_node_at_the_address_does_not_answer_for_a_node(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        found.neighbours["b"].says_it_is = "c"
        await found.probes(3)
        lost = await found.node("b")
        assert lost.status is NodeHealth.UNHEALTHY
        assert "ATOLL_NODE__URL" in (lost.problem or "")


async def test_the_probing_replica_checks_its_own_node_too(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        found.machine.trouble = "bubblewrap is gone"
        assert (await found.nodes.get(NODE)).status is NodeHealth.UNHEALTHY, "shown at once"
        assert (await found.node(NODE)).status is NodeHealth.HEALTHY
        await found.probes(3)
        assert (await found.node(NODE)).status is NodeHealth.UNHEALTHY
        found.machine.trouble = None
        await found.probes()
        assert (await found.node(NODE)).status is NodeHealth.HEALTHY


async def test_a_node_that_reaches_none_of_several_reporting_nodes_is_itself_disconnected(
    tmp_path: Path,
) -> None:
    async with environment(tmp_path, "b", "c") as found:
        for neighbour in found.neighbours.values():
            neighbour.answers = False
        for _ in range(5):
            await found.probes()
            await found.store.nodes.report(
                replace(await found.node("c"), seen_at=found.clock.now(), problem=None)
            )
        for node_id in "bc":
            assert (await found.node(node_id)).failures == 0
        # Not when they are silent, too.
        await found.probes(7)
        for node_id in "bc":
            assert (await found.node(node_id)).status is NodeHealth.UNHEALTHY


async def test_probes_need_a_current_token_for_this_node() -> None:
    clock = ManualClock()
    probing = NodeProbe(SECRET, clock, timedelta(seconds=1))
    token = probing.token("a")
    probing.verify(token, "a")
    for other in ("", "x", ".", "12.ab", f"{token}x", probing.token("b"), "٣.x", "9" * 99 + ".x"):
        with pytest.raises(Unauthenticated):
            probing.verify(other, "a")
    with pytest.raises(Unauthenticated):
        NodeProbe("another", clock, timedelta(seconds=1)).verify(token, "a")
    clock.time += timedelta(seconds=MAX_CLOCK_SKEW + 1)
    with pytest.raises(Unauthenticated):
        probing.verify(token, "a")


# Lost


async def test_sessions_of_a_lost_node_move_with_a_warning(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        running = await found.add("b", workspace="w", status=SessionStatus.RUNNING)
        stopped = await found.add("b", workspace="v", status=SessionStatus.STOPPED)
        ended = await found.add("b", status=SessionStatus.TERMINATED)
        own = await found.add(NODE)
        found.neighbours["b"].answers = False
        await found.probes(2)
        assert (await found.session(running.id)).runtime_node == "b"
        await found.probes()
        moved = await found.session(running.id)
        assert (moved.runtime_node, moved.status) == (NODE, SessionStatus.RESTORING)
        assert (moved.instance_id, moved.workspace) == (None, None)
        assert [item.code for item in moved.warnings] == ["memory_lost"]
        assert (await found.session(stopped.id)).runtime_node == NODE
        assert (await found.session(stopped.id)).status is SessionStatus.STOPPED
        assert (await found.session(ended.id)).runtime_node == "b"
        assert (await found.session(own.id)) == own
        assert found.moves.moved == {"node_lost": 2}


async def test_sessions_of_a_lost_node_are_spread_over_the_remaining_nodes(tmp_path: Path) -> None:
    async with environment(tmp_path, "b", "c") as found:
        for _ in range(60):
            await found.add("b")
        found.neighbours["b"].answers = False
        await found.probes(3)
        counts = {
            node_id: len(await found.store.sessions.unfinished(limit=99, node_id=node_id))
            for node_id in (NODE, "b", "c")
        }
        assert counts["b"] == 0
        assert abs(counts[NODE] - counts["c"]) <= 2, counts


async def test_a_node_that_recovers_keeps_its_remaining_sessions(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        session = await found.add("b")
        found.neighbours["b"].answers = False
        # No other can take it.
        await found.store.nodes.cordon(NODE, True)
        await found.probes(4)
        assert (await found.session(session.id)).runtime_node == "b"
        found.neighbours["b"].answers = True
        await found.store.nodes.cordon(NODE, False)
        await found.probes(2)
        assert (await found.session(session.id)).runtime_node == "b"


async def test_no_session_moves_from_a_node_without_shared_blobs(tmp_path: Path) -> None:
    async with environment(tmp_path, "b", shared=False) as found:
        session = await found.add("b")
        found.neighbours["b"].answers = False
        await found.probes(4)
        assert (await found.session(session.id)) == session


async def test_a_session_with_a_local_volume_waits_for_its_node_with_a_warning(
    tmp_path: Path,
) -> None:
    async with environment(tmp_path, "b") as found:
        await found.store.volumes.add(Volume("data", found.clock.now(), 1, "local", "b"))
        session = await found.add("b", volumes=(VolumeMount("data", "/data"),))
        found.neighbours["b"].answers = False
        await found.probes(5)
        waiting = await found.session(session.id)
        assert waiting.runtime_node == "b"
        assert [item.code for item in waiting.warnings] == [WAITS_FOR_NODE]
        assert waiting.version == session.version + 1, "said once"
        found.neighbours["b"].answers = True
        await found.probes()
        assert (await found.session(session.id)).warnings == ()


async def test_a_single_node_moves_nothing_whatever_its_problem(tmp_path: Path) -> None:
    async with environment(tmp_path) as found:
        session = await found.add(NODE)
        found.machine.trouble = "bubblewrap is gone"
        await found.probes(5)
        assert (await found.session(session.id)) == session
        assert (await found.nodes.get(NODE)).problem == "bubblewrap is gone"


async def test_a_session_changed_concurrently_is_not_moved(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        session = await found.add("b")
        await found.store.sessions.save(replace(session, labels={"a": "b"}))
        assert await found.moves.move(session, Cause.NODE_LOST) is None
        assert (await found.session(session.id)).runtime_node == "b"


async def test_a_session_moves_only_to_a_node_that_fits(tmp_path: Path) -> None:
    async with environment(tmp_path, "b", "c") as found:
        await found.store.nodes.report(replace(await found.node("c"), labels={"zone": "a"}))
        session = await found.add("b", node_labels={"zone": "a"})
        assert (await found.placements.assign(session)).id == "c"
        nowhere = await found.add("b", node_labels={"zone": "b"})
        with pytest.raises(TemporaryError, match="other labels") as refused:
            await found.placements.assign(nowhere)
        assert refused.value.code == "no_node"
        mounted = await found.add("b", template_id="gone")
        with pytest.raises(NotFound):
            await found.placements.assign(mounted)
        await found.store.volumes.add(Volume("data", found.clock.now(), 1, "local", "b"))
        pinned = await found.add("b", volumes=(VolumeMount("data", "/data"),))
        with pytest.raises(PermanentError):
            await found.placements.assign(pinned)


async def test_a_single_node_accepts_all_sessions_up_to_its_maximum(
    tmp_path: Path,
) -> None:
    async with environment(tmp_path) as found:
        full = replace(await found.node(NODE), sessions=10**6, problem="odd", templates=())
        await found.store.nodes.report(full)
        demand = PlacementRequest("python@1", RESOURCES)
        found.placements.invalidate()
        assert [node.id for node in await found.placements.candidates(demand)] == [NODE]
        await found.store.nodes.report(replace(await found.node(NODE), id="z", url="http://z"))
        found.placements.invalidate()
        assert await found.placements.candidates(demand) == []


# Back


async def test_leftovers_of_moved_sessions_are_removed_at_once(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        kept, gone = make_instance(workspace="kept"), make_instance(workspace="gone")
        pooled = make_instance(workspace="pooled", holder=ME)
        for instance in (kept, gone, pooled):
            await found.store.instances.add(instance)
            found.machine.there[instance.id] = instance
        await found.add(NODE, instance_id=kept.id, workspace="kept")
        session = await found.add(NODE, instance_id=gone.id, workspace="gone")
        assert await found.moved.once() == 0
        assert await found.moves.move(session, Cause.NODE_LOST) == "b"
        assert await found.moved.once() == 1
        assert set(found.machine.there) == {kept.id, pooled.id}
        assert found.machine.discarded == ["gone"]
        assert await found.store.instances.get(gone.id) is None


async def test_a_node_detects_that_it_was_considered_lost(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        report = NodeReport(
            found.parts.replica, found.nodes, found.moved, found.parts.settings.node, dict
        )
        await report.once(notified=False)
        instance = make_instance(workspace="gone")
        await found.store.instances.add(instance)
        found.machine.there[instance.id] = instance
        session = await found.add(NODE, instance_id=instance.id, workspace="gone")
        await found.moves.move(session, Cause.NODE_LOST)
        found.clock.time += timedelta(seconds=10)
        await report.once(notified=False)
        assert found.machine.there, "nobody has said anything yet"
        await found.store.nodes.record_probe(
            await found.node(NODE), status=NodeHealth.UNHEALTHY, failures=3, problem="mute"
        )
        found.clock.time += timedelta(seconds=10)
        await report.once(notified=False)
        assert not found.machine.there


async def test_reports_are_sent_regularly_and_after_changes(tmp_path: Path) -> None:
    async with environment(tmp_path) as found:
        pool: dict[str, int] = {}
        report = NodeReport(
            found.parts.replica,
            found.nodes,
            found.moved,
            found.parts.settings.node,
            lambda: dict(pool),
        )

        async def is_reported() -> bool:
            before = (await found.node(NODE)).seen_at
            found.clock.time += timedelta(seconds=1)
            await report.once(notified=False)
            return (await found.node(NODE)).seen_at != before

        assert await is_reported()
        assert not await is_reported()
        pool["python"] = 1
        assert await is_reported()
        report.templates_changed()
        assert await is_reported()
        assert not await is_reported()
        found.clock.time += timedelta(seconds=9)
        assert await is_reported()


# Drains


async def leaving(found: Environment, session_id: str, target: str) -> Session:
    session = await found.session(session_id)
    return await found.store.sessions.save(
        replace(session, runtime_node=target, instance_id=None, workspace=None)
    )


def drains(found: Environment, left: list[tuple[str, str]]) -> DrainReconciler:
    async def leave(session_id: str, target: Node) -> Session:
        left.append((session_id, target.id))
        return await leaving(found, session_id, target.id)

    return DrainReconciler(
        found.parts.replica,
        found.nodes,
        found.placements,
        found.moves,
        found.parts.runner,
        found.parts.settings.node.model_copy(
            update={"drain_grace": timedelta(seconds=0.3), "probe": timedelta(seconds=0.1)}
        ),
        leave,
    )


async def test_a_node_is_drained_with_progress(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        made = {(await found.add(NODE)).id for _ in range(5)}
        left: list[tuple[str, str]] = []
        loop = drains(found, left)
        await loop.once()
        assert left == []
        node = await found.nodes.drain(NODE)
        assert (node.cordoned, node.drain) == (True, Drain(5, 5))
        await loop.once()
        assert set(left) == {(session_id, "b") for session_id in made}
        node = await found.nodes.get(NODE)
        assert node.drain == Drain(5, 0)
        assert node.drained
        assert found.moves.moved == {"evicted": 5}
        node = await found.nodes.uncordon(NODE)
        assert (node.cordoned, node.drain) == (False, None)


async def test_a_node_lost_during_its_drain_is_empty_in_the_end(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        await found.add("b")
        assert (await found.nodes.drain("b")).drain == Drain(1, 1)
        found.neighbours["b"].answers = False
        await found.probes(3)
        assert (await found.node("b")).drain == Drain(1, 0)
        await found.nodes.remove("b")


async def test_a_session_that_cannot_move_is_reported_and_the_others_move(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        await found.store.volumes.add(Volume("data", found.clock.now(), 1, "local", NODE))
        pinned = await found.add(NODE, volumes=(VolumeMount("data", "/data"),))
        free = await found.add(NODE)
        left: list[tuple[str, str]] = []
        loop = drains(found, left)
        await found.nodes.drain(NODE)
        await loop.once()
        assert left == [(free.id, "b")]
        node = await found.nodes.get(NODE)
        assert node.drain is not None
        assert (node.drain.total, node.drain.left) == (2, 1)
        assert pinned.id in (node.drain.message or "")
        with pytest.raises(Conflict) as refused:
            await found.nodes.remove(NODE)
        assert refused.value.code == "node_in_use"


async def test_running_executions_get_a_limited_grace_period(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        instance = make_instance()
        await found.store.instances.add(instance)
        session = await found.add(NODE, instance_id=instance.id)
        await found.store.executions.add(make_execution(session_id=session.id, holder="other"))
        left: list[tuple[str, str]] = []
        await found.nodes.drain(NODE)
        began = asyncio.get_running_loop().time()
        await drains(found, left).once()
        assert asyncio.get_running_loop().time() - began >= 0.3
        assert left == [(session.id, "b")]


async def test_a_drain_needs_another_healthy_node(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        await found.store.nodes.cordon("b", True)
        with pytest.raises(Conflict, match="no other node is healthy") as refused:
            await found.nodes.drain(NODE)
        assert refused.value.code == "drain_unavailable"
        assert not (await found.nodes.get(NODE)).cordoned


async def test_a_drain_needs_shared_blobs(tmp_path: Path) -> None:
    async with environment(tmp_path, "b", shared=False) as found:
        with pytest.raises(Conflict, match="own disk"):
            await found.nodes.drain(NODE)


# The registry


async def test_nodes_are_listed_with_their_load_and_capabilities(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        await found.add(NODE)
        await found.add(NODE, status=SessionStatus.PAUSED)
        await found.add(NODE, status=SessionStatus.STOPPED)
        own = await found.nodes.report()
        assert own.sessions == 2
        assert own.templates == ("python@1",)
        assert own.max_sessions == IDLE.mem_total // found.parts.settings.session.memory
        assert own.shared_blobs
        assert [node.id for node in await found.nodes.list()] == ["b", NODE]
        with pytest.raises(NotFound) as missing:
            await found.nodes.cordon("z")
        assert missing.value.code == "node_not_found"


async def test_a_lost_node_without_sessions_can_be_deleted(tmp_path: Path) -> None:
    async with environment(tmp_path, "b") as found:
        with pytest.raises(Conflict):
            await found.nodes.remove("b")
        await found.store.nodes.record_probe(
            await found.node("b"),
            status=NodeHealth.UNHEALTHY,
            failures=3,
            problem="mute",
            event=Event("node.unhealthy", "b", found.clock.now()),
        )
        await found.nodes.remove("b")
        assert await found.store.nodes.get("b") is None
