"""This node and the others: placement, migration, and requests between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.drivers.shared.data_directories import NODE_DIRECTORY
from atoll.service.nodes.forward_token import MAX_CLOCK_SKEW, ForwardTokens
from atoll.service.nodes.local_node import LocalNode
from atoll.service.nodes.locations import SessionLocations
from atoll.service.nodes.migration import Migrations
from atoll.service.nodes.peers import Peers
from atoll.service.nodes.probe import NodeProbe
from atoll.service.nodes.remote_checkpoints import RemoteCheckpoints
from atoll.service.nodes.replay_guard import ReplayGuard
from atoll.service.nodes.service import Nodes
from atoll.service.placement.service import Placement

if TYPE_CHECKING:
    from atoll.app.backends import Backends
    from atoll.app.compute import ComputeGroup
    from atoll.service.sessions.core import SessionCore


@dataclass(frozen=True)
class NodeGroup:
    nodes: Nodes
    placement: Placement
    migrations: Migrations
    peers: Peers
    locations: SessionLocations
    remote_checkpoints: RemoteCheckpoints
    probe: NodeProbe


def node_group(
    backends: Backends, compute: ComputeGroup, core: SessionCore, *, url: str | None
) -> NodeGroup:
    """`url` is where the other nodes reach this control plane."""
    settings, replica = backends.settings, backends.replica
    store, clock, node_id = replica.store, replica.clock, replica.node_id
    own_url = url or f"unix://{settings.data_dir / NODE_DIRECTORY}"
    local = LocalNode(replica, backends.driver, compute.builds, compute.pool, settings, own_url)
    placement = Placement(
        store, compute.templates, clock, settings.node, node_id, compute.pool.sizes
    )
    migrations = Migrations(replica, placement, core.records)
    replay_guard = ReplayGuard(settings.data_dir / NODE_DIRECTORY / "nonces", MAX_CLOCK_SKEW)
    forward_tokens = ForwardTokens(backends.secret, node_id, clock, replay_guard)
    peers = Peers(replica, settings.node, forward_tokens)
    locations = SessionLocations(
        replica, peers, core.connections, migrations, shared_blobs=settings.blob.url is not None
    )
    probe = NodeProbe(backends.secret, clock, settings.node.probe_timeout, settings.node.ca_file)
    return NodeGroup(
        Nodes(replica, local),
        placement,
        migrations,
        peers,
        locations,
        RemoteCheckpoints(peers),
        probe,
    )
