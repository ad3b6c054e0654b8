"""Where a session can have its instance."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.model.node import Drain, Node, NodeHealth, NodeMetrics
from atoll.model.placement import MOUNT, PlacementRequest, rank, reason_not_to_place
from atoll.model.resources import Resources

GIB = 2**30
RESOURCES = Resources(cpu=1, memory=GIB, disk=GIB, max_processes=128)
DEMAND = PlacementRequest("python@2", RESOURCES)
IDLE = NodeMetrics(0.1, 0.1, 10**12, 8, 64 * GIB, 0.5)


def node(node_id: str = "a", **options: Any) -> Node:
    return Node(node_id, "local", f"http://{node_id}", **{"metrics": IDLE, **options})


def demand(**options: Any) -> PlacementRequest:
    return replace(DEMAND, **options)


@pytest.mark.parametrize(
    ("found", "asked"),
    [
        pytest.param(node(), DEMAND, id="nothing special"),
        pytest.param(
            node(provides=frozenset({"seccomp", "pause"})),
            demand(require=frozenset({"seccomp"}), features=frozenset({"pause"})),
            id="what is demanded is there",
        ),
        pytest.param(
            node(labels={"zone": "a", "x": "y"}), demand(labels={"zone": "a"}), id="label"
        ),
        pytest.param(node(), demand(node_id="a"), id="the very node"),
        pytest.param(node(max_sessions=3, sessions=2), DEMAND, id="one more"),
        pytest.param(node(metrics=replace(IDLE, mem_usage=0.98)), DEMAND, id="memory is left"),
        pytest.param(node(metrics=None), DEMAND, id="it has not told how busy it is"),
        pytest.param(node(failures=2), DEMAND, id="it missed a probe"),
        pytest.param(node(shared_blobs=True), demand(shared_blobs=True), id="blobs are shared"),
    ],
)
def test_a_node_fits(found: Node, asked: PlacementRequest) -> None:
    assert reason_not_to_place(found, asked) is None
    assert rank([found], asked, spread_above=35) == [found]


@pytest.mark.parametrize(
    ("found", "asked"),
    [
        pytest.param(node(status=NodeHealth.UNHEALTHY), DEMAND, id="unhealthy"),
        pytest.param(node(problem="no space left"), DEMAND, id="not well by its own word"),
        pytest.param(node(cordoned=True), DEMAND, id="cordoned"),
        pytest.param(node(drain=Drain(0, 0)), DEMAND, id="drained"),
        pytest.param(node(), demand(require=frozenset({"seccomp"})), id="requirement"),
        pytest.param(node(), demand(features=frozenset({MOUNT})), id="feature"),
        pytest.param(node(labels={"zone": "b"}), demand(labels={"zone": "a"}), id="other label"),
        pytest.param(node(), demand(labels={"zone": ""}), id="no label"),
        pytest.param(node(), demand(node_id="b"), id="a volume elsewhere"),
        pytest.param(node(), demand(exclude=frozenset({"a"})), id="excluded"),
        pytest.param(node(max_sessions=3, sessions=3), DEMAND, id="full"),
        pytest.param(node(metrics=replace(IDLE, mem_usage=0.99)), DEMAND, id="no memory"),
        pytest.param(node(), demand(shared_blobs=True), id="blobs of its own"),
    ],
)
def test_a_node_does_not_fit(found: Node, asked: PlacementRequest) -> None:
    assert reason_not_to_place(found, asked)
    assert rank([found], asked, spread_above=35) == []


WARM = {"pool": {"python": 1}}
CACHED = {"templates": ("python@2",)}
BUILDING = {"building": ("python@2",)}
BUSY = {"metrics": replace(IDLE, cpu_usage=0.9)}


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(WARM, CACHED, id="a warm instance before a template that is there"),
        pytest.param(CACHED, BUILDING, id="there before being built"),
        pytest.param(BUILDING, {}, id="being built before nothing"),
        pytest.param({"templates": ("python@2",)}, {"templates": ("python@1",)}, id="this edition"),
        pytest.param({**WARM, **BUSY}, {}, id="a warm instance before load"),
        pytest.param({}, BUSY, id="cpu"),
        pytest.param({}, {"metrics": replace(IDLE, mem_usage=0.5)}, id="memory"),
        pytest.param({}, {"sessions": 1}, id="sessions"),
        pytest.param(
            {"metrics": replace(IDLE, cpu_usage=0.12)},
            {"sessions": 1, "metrics": replace(IDLE, cpu_usage=0.11)},
            id="sessions before a small difference in load",
        ),
        pytest.param({"sessions": 35}, {**WARM, "sessions": 36}, id="few before many"),
        pytest.param({**WARM, "sessions": 40}, {"sessions": 36}, id="of many, the warm one"),
        pytest.param({}, {"metrics": None}, id="known load before unknown"),
        pytest.param({"pool": {"other": 9}, **CACHED}, {"pool": {"other": 9}}, id="other pools"),
    ],
)
def test_the_better_node_comes_first(better: dict[str, Any], worse: dict[str, Any]) -> None:
    # Independently of their names.
    for first, second in (("a", "b"), ("b", "a")):
        nodes = [node(second, **worse), node(first, **better)]
        assert [found.id for found in rank(nodes, DEMAND, spread_above=35)] == [first, second]


def test_a_ready_instance_does_not_count_for_a_session_that_needs_its_own() -> None:
    nodes = [node("a", **WARM), node("b", **CACHED)]
    assert [found.id for found in rank(nodes, DEMAND, spread_above=35)] == ["a", "b"]
    own = demand(pooled=False)
    assert [found.id for found in rank(nodes, own, spread_above=35)] == ["b", "a"]


def test_equal_nodes_are_ordered_by_their_ids() -> None:
    nodes = [node(name) for name in ("c", "a", "b")]
    assert [found.id for found in rank(nodes, DEMAND, spread_above=35)] == ["a", "b", "c"]


# Any set of nodes

names = st.sets(st.sampled_from(["seccomp", "own_uid", "pause", MOUNT])).map(frozenset)
shares = st.floats(0, 1)
labels = st.dictionaries(st.sampled_from(["zone", "gpu"]), st.sampled_from(["a", "b"]), max_size=2)
editions = st.lists(st.sampled_from(["python@1", "python@2", "data@1"]), max_size=3).map(tuple)
nodes_given = st.lists(
    st.builds(
        Node,
        id=st.sampled_from([f"node-{number}" for number in range(8)]),
        type=st.just("local"),
        url=st.just("http://x"),
        labels=labels,
        provides=names,
        max_sessions=st.none() | st.integers(1, 50),
        metrics=st.none()
        | st.builds(
            NodeMetrics,
            shares,
            shares,
            st.just(0),
            st.just(4),
            st.integers(0, 64 * GIB),
            st.just(0.0),
        ),
        sessions=st.integers(0, 60),
        templates=editions,
        building=editions,
        pool=st.dictionaries(st.sampled_from(["python", "data"]), st.integers(0, 2)),
        shared_blobs=st.booleans(),
        problem=st.none() | st.just("mute"),
        status=st.sampled_from(NodeHealth),
        cordoned=st.booleans(),
        drain=st.none() | st.just(Drain(1, 1)),
    ),
    max_size=8,
    unique_by=lambda found: found.id,
)
demands = st.builds(
    PlacementRequest,
    template=st.sampled_from(["python@2", "data@1"]),
    resources=st.just(RESOURCES),
    require=names,
    features=names,
    labels=labels,
    node_id=st.none() | st.just("node-3"),
    exclude=st.sets(st.sampled_from(["node-1", "node-3"])).map(frozenset),
    pooled=st.booleans(),
    shared_blobs=st.booleans(),
)


@given(nodes=nodes_given, asked=demands, spread=st.integers(0, 40))
def test_exactly_the_suitable_nodes_are_ranked(
    nodes: list[Node], asked: PlacementRequest, spread: int
) -> None:
    ranked = rank(nodes, asked, spread_above=spread)
    assert {found.id for found in ranked} == {
        found.id for found in nodes if reason_not_to_place(found, asked) is None
    }
    for found in ranked:
        assert found.status is NodeHealth.HEALTHY
        assert found.problem is None
        assert not found.cordoned
        assert found.drain is None
        assert asked.require | asked.features <= found.provides
        assert asked.labels.items() <= found.labels.items()
        assert found.max_sessions is None or found.sessions < found.max_sessions
        assert found.id not in asked.exclude
        assert asked.node_id in (None, found.id)


@given(nodes=nodes_given, asked=demands, spread=st.integers(0, 40), seed=st.integers())
def test_the_order_does_not_depend_on_that_of_the_input(
    nodes: list[Node], asked: PlacementRequest, spread: int, seed: int
) -> None:
    ranked = rank(nodes, asked, spread_above=spread)
    shuffled = list(nodes)
    random.Random(seed).shuffle(shuffled)
    assert rank(shuffled, asked, spread_above=spread) == ranked
    for place, one in enumerate(ranked):
        for other in ranked[place + 1 :]:
            assert rank([other, one], asked, spread_above=spread) == [one, other]
