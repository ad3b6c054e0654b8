"""Nodes: their own reports, and fields that other nodes write."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest

from atoll.model.event import Event
from atoll.model.node import Drain, Node, NodeHealth, NodeMetrics

if TYPE_CHECKING:
    from atoll.stores.base import Store

pytestmark = pytest.mark.anyio

AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
METRICS = NodeMetrics(0.25, 0.5, 10**12, 8, 2**36, 1.5)


def node(node_id: str = "local-1") -> Node:
    return Node(
        id=node_id,
        type="local",
        url="http://10.0.0.1:8000",
        labels={"zone": "a", "größe": "\ud800\x00"},
        provides=frozenset({"own_uid", "pause"}),
        missing={"disk_quota": "no project quotas"},
        max_sessions=40,
        metrics=METRICS,
        sessions=3,
        templates=("python@1", "data@2"),
        building=("data@3",),
        pool={"python": 2},
        shared_blobs=True,
        seen_at=AT,
        problem="no space left",
    )


async def test_the_report_of_a_node_is_stored_unchanged(store: Store) -> None:
    assert await store.nodes.get("local-1") is None
    await store.nodes.report(node())
    assert await store.nodes.get("local-1") == node()
    bare = Node("local-0", "local", "http://x")
    await store.nodes.report(bare)
    assert await store.nodes.all() == [bare, node()]


async def test_a_report_does_not_overwrite_what_other_nodes_wrote(store: Store) -> None:
    await store.nodes.report(node())
    assert await store.nodes.record_probe(
        node(), status=NodeHealth.UNHEALTHY, failures=3, problem="mute"
    )
    assert await store.nodes.cordon("local-1", True)
    assert await store.nodes.drain("local-1", Drain(4, 2, "busy"))
    later = replace(node(), sessions=9, problem=None, labels={})
    await store.nodes.report(later)
    assert await store.nodes.get("local-1") == replace(
        later,
        status=NodeHealth.UNHEALTHY,
        failures=3,
        problem="mute",
        cordoned=True,
        drain=Drain(4, 2, "busy"),
    )


async def test_a_new_node_is_stored_with_all_its_fields(store: Store) -> None:
    given = replace(node(), cordoned=True, failures=1, status=NodeHealth.UNHEALTHY)
    await store.nodes.report(given)
    assert await store.nodes.get("local-1") == given


async def test_a_probe_result_that_lost_a_race_writes_nothing(store: Store) -> None:
    await store.nodes.report(node())
    found = await store.nodes.get("local-1")
    assert found is not None
    judged = await asyncio.gather(
        *(
            store.nodes.record_probe(
                found, status=NodeHealth.HEALTHY, failures=1, problem=f"mute {count}"
            )
            for count in range(4)
        )
    )
    assert sorted(judged) == [False, False, False, True]
    now = await store.nodes.get("local-1")
    assert now is not None
    assert now.failures == 1
    assert now.problem == f"mute {judged.index(True)}"
    assert await store.nodes.record_probe(now, status=NodeHealth.HEALTHY, failures=0, problem=None)
    found = await store.nodes.get("local-1")
    assert found == node(), "what it says itself is seen again"


async def test_progress_is_written_only_during_a_drain(store: Store) -> None:
    await store.nodes.report(node())
    assert not await store.nodes.update_drain("local-1", Drain(3, 1))
    assert await store.nodes.drain("local-1", Drain(3, 3))
    assert await store.nodes.update_drain("local-1", Drain(3, 1))
    found = await store.nodes.get("local-1")
    assert found is not None
    assert found.drain == Drain(3, 1)
    assert await store.nodes.drain("local-1", None)
    assert not await store.nodes.update_drain("local-1", Drain(3, 0))
    found = await store.nodes.get("local-1")
    assert found is not None
    assert found.drain is None


async def test_writes_to_a_missing_node_return_false(store: Store) -> None:
    event = Event("node.removed", "local-1", AT)
    assert not await store.nodes.cordon("local-1", True, event=event)
    assert not await store.nodes.drain("local-1", Drain(1, 1), event=event)
    assert not await store.nodes.remove("local-1", event=event)
    missing = await store.nodes.record_probe(
        node(), status=NodeHealth.HEALTHY, failures=0, problem=None, event=event
    )
    assert not missing


async def test_a_removed_node_is_missing_until_its_next_report(store: Store) -> None:
    await store.nodes.report(node(), event=Event("node.registered", "local-1", AT))
    assert await store.nodes.remove("local-1", event=Event("node.removed", "local-1", AT))
    assert not await store.nodes.remove("local-1")
    assert await store.nodes.all() == []
    await store.nodes.report(node())
    assert await store.nodes.get("local-1") == node()


async def test_concurrent_reports_of_a_new_node_add_it_once(store: Store) -> None:
    await asyncio.gather(*(store.nodes.report(replace(node(), sessions=n)) for n in range(8)))
    [found] = await store.nodes.all()
    assert found.id == "local-1"
