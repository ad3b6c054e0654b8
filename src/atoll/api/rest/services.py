"""The services that the routes call, and what a request knows of its caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request

    from atoll.api.rest.middleware.client_limits import ResponseMemory, StreamLimit
    from atoll.blobs.base import Blobs
    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.service.checkpoints.service import Checkpoints
    from atoll.service.contexts.service import Contexts
    from atoll.service.events.service import Feed
    from atoll.service.executions.artifacts import Artifacts
    from atoll.service.executions.console import Consoles
    from atoll.service.executions.service import Executions
    from atoll.service.files.service import Files
    from atoll.service.files.signed_urls import SignedUrls
    from atoll.service.invocations.service import Invocations
    from atoll.service.nodes.locations import SessionLocations
    from atoll.service.nodes.peers import Peers
    from atoll.service.nodes.service import Nodes
    from atoll.service.placement.service import Placement
    from atoll.service.pool.service import Pool
    from atoll.service.sessions.checkpoint_requests import CheckpointRequests
    from atoll.service.sessions.dependencies import Dependencies
    from atoll.service.sessions.secrets import SessionSecrets
    from atoll.service.sessions.service import Sessions
    from atoll.service.templates.build_inputs import BuildInputs
    from atoll.service.templates.builds import Builds
    from atoll.service.templates.service import Templates
    from atoll.service.volumes.service import Volumes
    from atoll.service.webhooks.service import Webhooks
    from atoll.settings import Settings
    from atoll.stores.base import Store


@dataclass(frozen=True)
class Services:
    sessions: Sessions
    dependencies: Dependencies
    executions: Executions
    consoles: Consoles
    contexts: Contexts
    invocations: Invocations
    files: Files
    signed_urls: SignedUrls
    artifacts: Artifacts
    checkpoints: Checkpoints
    checkpoint_requests: CheckpointRequests
    templates: Templates
    build_inputs: BuildInputs
    secrets: SessionSecrets
    volumes: Volumes
    builds: Builds
    nodes: Nodes
    placements: Placement
    peers: Peers
    locations: SessionLocations
    feed: Feed
    webhooks: Webhooks
    pool: Pool
    store: Store
    blobs: Blobs
    coordination: Coordination
    clock: Clock
    settings: Settings
    streams: StreamLimit
    response_memory: ResponseMemory


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def key_id_of(request: Request) -> str | None:
    """The id of the API key of a request; None in the embedded mode and for signed links."""
    key_id: str | None = request.scope.get("atoll.key")
    return key_id
