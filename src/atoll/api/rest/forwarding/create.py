"""
Creates and clones sessions where there are several nodes: on the best one that accepts.

Candidates are tried in order. One that refuses or cannot be reached is followed by the next; one
that may have started is not, because a retry with the same `Idempotency-Key` gets the session it
created. That key is handled by the node that creates the session; its record is in the database,
for all nodes.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import structlog
from pydantic import ValidationError

from atoll.api.rest.forwarding.proxy import NodeNotReached, forward
from atoll.api.rest.forwarding.refusals import CANNOT_CREATE, CANNOT_START, Refusal, RefusalFilter
from atoll.api.rest.forwarding.request_body import (
    ClientRequest,
    ReplayableBody,
)
from atoll.api.rest.forwarding.route_target import TargetKind
from atoll.api.rest.middleware.bodies import ClientDisconnected
from atoll.api.rest.problems import problem
from atoll.api.rest.schemas.sessions import CreateSession
from atoll.errors import AtollError, InvalidRequest, NodeUnreachable, NotFound, TemporaryError
from atoll.model.node import versioned_name
from atoll.model.placement import PlacementRequest, rank
from atoll.model.session import WorkspaceMode
from atoll.model.template import DEFAULT_TEMPLATE
from atoll.service.placement.service import mounts, pinned

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from atoll.api.rest.forwarding.route_target import RouteTarget
    from atoll.api.rest.services import Services
    from atoll.model.node import Node
    from atoll.model.session import Session

log = structlog.get_logger(__name__)

MAX_CANDIDATES = 8
"""Nodes that are tried for one session."""


class CreateForwarding:
    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._peers = services.peers
        self._placements = services.placements
        self._templates = services.templates
        self._store = services.store
        self._spread_above = services.settings.node.spread_above

    async def __call__(
        self, target: RouteTarget, scope: Scope, receive: Receive, send: Send
    ) -> None:
        body = ReplayableBody(receive)
        try:
            await body.read(limit=None)
        except ClientDisconnected:
            return
        try:
            if target.kind is TargetKind.CLONE:
                demand, preferred = await self._demand_of_clone(target.id)
            else:
                demand, preferred = await self._demand_of_create(body.data), None
        except (AtollError, ValidationError):
            # No node can create it; the application of this one responds with the reason.
            await self._app(scope, body.receive, send)
            return
        try:
            nodes = await self._candidates(demand)
        except AtollError as error:
            await problem(error)(scope, receive, send)
            return
        # The files of the source are there, so they need not be copied.
        nodes.sort(key=lambda node: node.id != preferred)
        await self._try_in_turn(nodes, ClientRequest(scope, body, send))

    async def _try_in_turn(self, nodes: list[Node], request: ClientRequest) -> None:
        refusal: Refusal | None = None
        reason = "no other node is known to be healthy"
        for node in nodes:
            try:
                refusal = await self._try(node, request)
                if refusal is None:
                    return
                reason = str(refusal.code)
            except NodeNotReached as error:
                reason = str(error)
                if error.may_have_started:
                    refusal = None
                    break
            log.info("session.refused", node_id=node.id, reason=reason)
            self._placements.invalidate()
        if refusal is not None and refusal.code in CANNOT_START:
            await refusal.send(request.send)
            return
        failure = problem(NodeUnreachable(f"Cannot create the session: {reason}."))
        await failure(request.scope, request.body.receive, request.send)

    async def _try(self, node: Node, request: ClientRequest) -> Refusal | None:
        self._placements.record(node.id)
        if node.id == self._peers.node_id:
            request.body.rewind()
            response = RefusalFilter(request.send, CANNOT_CREATE)
            # A copy: the application writes to the scope, and the next node must get it unchanged.
            await self._app(dict(request.scope), request.body.receive, response.send)
            return response.refusal
        reached = self._peers.healthy(node.id)
        if reached is None:
            await self._peers.refresh(force=False)
            reached = self._peers.healthy(node.id)
        if reached is None:
            raise NodeNotReached(f"node {node.id} is not healthy", may_have_started=False)
        return await forward(self._peers, reached, request, CANNOT_CREATE)

    async def _demand_of_clone(self, session_id: str) -> tuple[PlacementRequest, str | None]:
        """What a copy of a session demands of a node, and the node that it is best placed on."""
        source = await self._store.sessions.get(session_id)
        if source is None:
            raise NotFound(f"No session has the id {session_id}.", code="session_not_found")
        demand = await self._placements.request_of(source)
        return self._with_files_of(source, demand), source.runtime_node

    async def _demand_of_create(self, data: bytes) -> PlacementRequest:
        """What a new session demands of a node; raises an error if no node could create it."""
        body = CreateSession.model_validate_json(data or b"{}")
        template = await self._templates.ready(body.template_id or DEFAULT_TEMPLATE)
        volumes = [await self._store.volumes.get(mount.volume_id) for mount in body.volumes]
        resources = body.limits(template.default_resources)
        if resources is not template.default_resources:
            await self._templates.check_resources(resources)
        demand = PlacementRequest(
            template=versioned_name(template.id, template.number),
            resources=resources,
            require=frozenset(template.require),
            features=mounts(body.workspace_mode, volumes) | template.features,
            labels=body.node_labels,
            node_id=pinned(volumes),
            pooled=not volumes
            and body.workspace_mode is WorkspaceMode.SYNC
            and body.started_from is None,
        )
        if body.started_from is None:
            return demand
        source = await self._store.sessions.get(body.started_from)
        return demand if source is None else self._with_files_of(source, demand)

    def _with_files_of(self, source: Session, demand: PlacementRequest) -> PlacementRequest:
        """The demand, limited to nodes that can get the source's checkpoint."""
        demand = dataclasses.replace(demand, pooled=False)
        node = self._peers.get(source.runtime_node)
        if node is not None and node.shared_blobs:
            return dataclasses.replace(demand, shared_blobs=True)
        return dataclasses.replace(demand, node_id=demand.node_id or source.runtime_node)

    async def _candidates(self, demand: PlacementRequest) -> list[Node]:
        """
        The nodes that fit by this replica's count, then those that fit by their own last report:
        sessions that were given to them since may have ended.
        """
        nodes = await self._placements.candidates(demand)
        known = await self._store.nodes.all()
        listed = {node.id for node in nodes}
        nodes += [
            node
            for node in rank(known, demand, spread_above=self._spread_above)
            if node.id not in listed
        ]
        if nodes:
            return nodes[:MAX_CANDIDATES]
        lacking = [demand.require - node.provides for node in known]
        if known and all(lacking):
            missing = min((sorted(names) for names in lacking), key=len)
            raise InvalidRequest(
                f"No node meets the template's security requirements: {', '.join(missing)}.",
                code="isolation_unavailable",
                missing=missing,
            )
        raise TemporaryError(
            "No node can take this session at the moment: each is full, cordoned, unreachable, or "
            "lacks something that the session needs.",
            code="no_node",
            retry_after=5,
        )
