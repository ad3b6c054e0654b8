"""
Sessions that are made, or cloned, where there are several nodes: on the best one that takes it.

Nodes are asked in the order of `Placements`; one that refuses because it is full, or does not
answer, is followed by the next. One that may have begun is not: who asks again with the same
`Idempotency-Key` is given what it made. That key is seen to where the session is made; its record
is in the database, so it counts for all.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import structlog
from pydantic import ValidationError

from atoll.api.rest.forwarding.proxy import (
    Body,
    ClientDisconnected,
    NodeNotReached,
    Refusal,
    RefusalFilter,
    pass_on,
)
from atoll.api.rest.forwarding.route_target import TargetKind
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

REFUSALS = frozenset(
    {
        "engine_unavailable",
        "instance_not_started",
        "node_cordoned",
        "node_full",
        "node_not_reached",
        "wrong_node",
    }
)
"""What a node says that another one may not say."""
MOST_ASKED = 8
"""Nodes that are asked for one session."""


class CreateForwarding:
    def __init__(self, app: ASGIApp, found: Services) -> None:
        self._app = app
        self._peers = found.peers
        self._placements = found.placements
        self._templates = found.templates
        self._store = found.store
        self._spread_above = found.settings.node.spread_above

    async def __call__(
        self, asked: RouteTarget, scope: Scope, receive: Receive, send: Send
    ) -> None:
        body = Body(receive)
        try:
            await body.begin(limit=None)
        except ClientDisconnected:
            return
        try:
            if asked.kind is TargetKind.CLONE:
                demand, first = await self._of_clone(asked.id)
            else:
                demand, first = await self._demand(body.data), None
        except (AtollError, ValidationError):
            # It cannot be made anywhere; what is wrong is told here as everywhere.
            await self._app(scope, body.receive, send)
            return
        try:
            nodes = await self._candidates(demand)
            # The files are there: they need not be saved, nor fetched.
            nodes.sort(key=lambda node: node.id != first)
        except AtollError as error:
            await problem(error)(scope, receive, send)
            return
        await self._try_in_turn(nodes, scope, body, send)

    async def _try_in_turn(self, nodes: list[Node], scope: Scope, body: Body, send: Send) -> None:
        refusal: Refusal | None = None
        why = "no other node is known to answer"
        for node in nodes:
            try:
                refusal = await self._try(node, scope, body, send)
                if refusal is None:
                    return
                why = str(refusal.code)
            except NodeNotReached as error:
                why = str(error)
                if error.begun:
                    refusal = None
                    break
            log.info("session.refused", node_id=node.id, why=why)
            self._placements.forget()
        if refusal is not None and refusal.code not in ("wrong_node", "node_not_reached"):
            await refusal.tell(send)
            return
        words = f"The session could not be made: {why}."
        await problem(NodeUnreachable(words))(scope, body.receive, send)

    async def _try(self, node: Node, scope: Scope, body: Body, send: Send) -> Refusal | None:
        self._placements.gave(node.id)
        if node.id == self._peers.node_id:
            body.again()
            held = RefusalFilter(send, REFUSALS)
            # It says in the scope what it did with it: the next one is to get it as it came.
            await self._app(dict(scope), body.receive, held.send)
            return held.refusal
        reached = self._peers.healthy(node.id)
        if reached is None:
            await self._peers.refresh(force=False)
            reached = self._peers.healthy(node.id)
        if reached is None:
            raise NodeNotReached(f"node {node.id} is not known to answer", begun=False)
        return await pass_on(self._peers, reached, scope, body, send, REFUSALS)

    async def _of_clone(self, session_id: str) -> tuple[PlacementRequest, str | None]:
        """What a copy of a session asks of a node, and the node that would do best."""
        source = await self._store.sessions.get(session_id)
        if source is None:
            raise NotFound(f"No session has the id {session_id}.", code="session_not_found")
        demand = await self._placements.demand(source)
        return self._with_files_of(source, demand), source.runtime_node

    async def _demand(self, data: bytes) -> PlacementRequest:
        """What is asked of a node; an error when no node could make it."""
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
        """Where what is saved of the source can be had."""
        demand = dataclasses.replace(demand, pooled=False)
        node = self._peers.get(source.runtime_node)
        if node is not None and node.shared_blobs:
            return dataclasses.replace(demand, shared_blobs=True)
        return dataclasses.replace(demand, node_id=demand.node_id or source.runtime_node)

    async def _candidates(self, demand: PlacementRequest) -> list[Node]:
        """
        Those that are thought to fit, then those that fit by their own last word: what was given
        to them since may have ended already, and they know.
        """
        nodes = await self._placements.candidates(demand)
        known = await self._store.nodes.all()
        asked = {node.id for node in nodes}
        nodes += [
            node
            for node in rank(known, demand, spread_above=self._spread_above)
            if node.id not in asked
        ]
        if nodes:
            return nodes[:MOST_ASKED]
        lacking = [demand.require - node.provides for node in known]
        if known and all(lacking):
            missing = min((sorted(names) for names in lacking), key=len)
            raise InvalidRequest(
                f"No node gives what the template demands: {', '.join(missing)}.",
                code="isolation_unavailable",
                missing=missing,
            )
        raise TemporaryError(
            "No node takes this session at the moment: all are full, cordoned or away, or lack "
            "what it asks for.",
            code="no_node",
            retry_after=5,
        )
