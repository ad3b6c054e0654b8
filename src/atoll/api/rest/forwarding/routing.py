"""
Serves requests about sessions of other nodes, by forwarding them.

Any node accepts requests about any session. A request about a session of another node is streamed
there, with the caller's own key, and its response is streamed back. A request is forwarded at most
once: the `Atoll-Hop` header marks it, and a node that gets it without having the session refuses it
with `wrong_node`, after which the first node looks the session up again. A request that may have
started is not repeated.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from atoll.api.rest import host_header
from atoll.api.rest.forwarding.create import CreateForwarding
from atoll.api.rest.forwarding.middleware import FORWARD_TOKEN
from atoll.api.rest.forwarding.proxy import NodeNotReached, forward, target_of
from atoll.api.rest.forwarding.refusals import CANNOT_START, Refusal, RefusalFilter
from atoll.api.rest.forwarding.request_body import (
    ClientRequest,
    ReplayableBody,
)
from atoll.api.rest.forwarding.route_target import (
    SAFE_METHODS,
    RouteTarget,
    TargetKind,
    target_of_request,
)
from atoll.api.rest.headers import header_of
from atoll.api.rest.middleware.bodies import ClientDisconnected
from atoll.api.rest.problems import problem
from atoll.api.ws.console import check_origin, deny
from atoll.api.ws.proxy import WebSocketProxy
from atoll.errors import AtollError, NodeUnreachable, TemporaryError
from atoll.service.nodes.forward_token import WRONG_NODE
from atoll.service.nodes.remote_checkpoints import caller_authorization
from atoll.service.sessions.start import may_start

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from atoll.api.rest.services import Services

MAX_TRIES = 3
"""Nodes that a request is sent to while its session moves."""


class SessionRouting:
    """Serves a request here, or forwards it to the node of its session."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._peers = services.peers
        self._locations = services.locations
        self._signed_urls = services.signed_urls
        self._cors_origins = services.settings.cors_origins
        self._trusted_hosts = services.settings.trusted_hosts
        self._create = CreateForwarding(app, services)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = header_of(scope, FORWARD_TOKEN)
        caller_authorization.set(_authorization(scope))
        target = target_of_request(scope.get("method", "GET"), scope["path"])
        if token is None:
            self._hide_untrusted_host(scope)
            await self._route(target, scope, receive, send)
            return
        try:
            receive = await self._check_token(token, target, scope, receive)
        except ClientDisconnected:
            return
        except AtollError as error:
            await problem(error)(scope, receive, send)
            return
        scope[host_header.FORWARDED] = True
        await self._app(scope, receive, send)

    def _hide_untrusted_host(self, scope: Scope) -> None:
        if scope["type"] == "http" and not host_header.is_trusted(scope, self._trusted_hosts):
            others = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope["headers"] = [*others, (b"host", host_header.UNKNOWN)]

    async def _check_token(
        self, header: bytes, target: RouteTarget | None, scope: Scope, receive: Receive
    ) -> Receive:
        """Check that another node forwarded this very request, and that the session is here."""
        method = scope.get("method", "GET")
        token = await self._peers.verify(header.decode("latin-1"), method, target_of(scope))
        scope["scheme"] = _scheme(scope, token.scheme)
        session_id = None if target is None else await self._session_of(target, scope)
        if session_id is not None:
            elsewhere = await self._locations.node_of(session_id, fresh=True)
            if elsewhere is not None:
                message = f"Session {session_id} is on node {elsewhere}."
                raise TemporaryError(message, code=WRONG_NODE)
        if scope["type"] == "websocket":
            return receive
        body = ReplayableBody(receive)
        await body.check(token.content, scope["headers"])
        return body.receive if body.complete else receive

    async def _route(
        self, target: RouteTarget | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Serve a client's request here or on the node of its session."""
        is_http = scope["type"] == "http"
        try:
            session_id = None if target is None else await self._session_of(target, scope)
            node_id = None if session_id is None else await self._locations.node_of(session_id)
        except AtollError:
            # The application returns the right error, or serves the request from memory.
            await self._app(scope, receive, send)
            return
        if target is None:
            await self._app(scope, receive, send)
        elif is_http and target.kind in (TargetKind.CREATE, TargetKind.CLONE):
            await self._create(target, scope, receive, send)
        elif is_http and target.kind is TargetKind.INVOKE:
            await self._invoke(target, scope, receive, send)
        elif session_id is None or self._is_served_here(target, session_id, node_id):
            await self._app(scope, receive, send)
        elif is_http:
            request = ClientRequest(scope, ReplayableBody(receive), send)
            await self._forward(target, session_id, node_id, request)
        else:
            await self._connect(session_id, node_id, scope, receive, send)

    def _is_served_here(self, target: RouteTarget, session_id: str, node_id: str | None) -> bool:
        # Unless the session runs, it may have to be started on another node.
        return node_id is None and (
            not target.needs_instance or self._locations.is_connected(session_id)
        )

    async def _session_of(self, target: RouteTarget, scope: Scope) -> str | None:
        """The session that a request concerns; None if any node can serve it."""
        match target.kind:
            case TargetKind.SESSION:
                return target.id
            case TargetKind.EXECUTION:
                return await self._locations.session_of_execution(target.id)
            case TargetKind.INVOCATION:
                return await self._locations.session_of_invocation(target.id)
            case TargetKind.SIGNED:
                method = "GET" if scope["method"] == "HEAD" else scope["method"]
                return (await self._signed_urls.verify(target.id, method)).session_id
            case _:
                return None

    # HTTP

    async def _invoke(
        self, target: RouteTarget, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """`POST invocations` has its session in the body."""
        body = ReplayableBody(receive)
        try:
            await body.read(limit=None)
        except ClientDisconnected:
            return
        session_id = _session_in(body.data)
        if session_id is None:
            await self._app(scope, body.receive, send)
            return
        try:
            node_id = await self._locations.node_of(session_id)
        except AtollError:
            node_id = None
        await self._forward(target, session_id, node_id, ClientRequest(scope, body, send))

    async def _forward(
        self,
        target: RouteTarget,
        session_id: str,
        node_id: str | None,
        request: ClientRequest,
    ) -> None:
        """Serve it on a node, this one if `node_id` is None, and follow a session that moves."""
        scope, body = request.scope, request.body
        refusal: Refusal | None = None
        failure = NodeNotReached("the session is moving", may_have_started=False)
        try:
            await body.read()
            if not body.complete and node_id is not None:
                # It can be sent only once, so make sure of the node.
                node_id = await self._locations.node_of(session_id, fresh=True)
            for _ in range(MAX_TRIES):
                tried, refusal = node_id, None
                try:
                    refusal = await self._try(node_id, request)
                    if refusal is None:
                        return
                except NodeNotReached as error:
                    failure = error
                was_not_started = refusal is not None or not failure.may_have_started
                if body.consumed or not (was_not_started or scope["method"] in SAFE_METHODS):
                    break
                node_id = await self._locate_again(target, session_id, tried, refusal)
                if node_id == tried and was_not_started:
                    break
        except ClientDisconnected:
            return
        except TemporaryError as error:
            await problem(error)(scope, body.receive, request.send)
            return
        if refusal is not None and refusal.code != WRONG_NODE:
            await refusal.send(request.send)
        elif target.falls_back and not body.consumed:
            # The application serves what is in the database, and returns an error for the rest.
            body.rewind()
            await self._app(scope, body.receive, request.send)
        else:
            await problem(_not_reached(session_id, failure))(scope, body.receive, request.send)

    async def _try(self, node_id: str | None, request: ClientRequest) -> Refusal | None:
        if node_id is None:
            request.body.rewind()
            response = RefusalFilter(request.send, CANNOT_START)
            await self._app(dict(request.scope), request.body.receive, response.send)
            return response.refusal
        node = self._peers.healthy(node_id)
        if node is None:
            raise NodeNotReached(f"node {node_id} is not healthy", may_have_started=False)
        return await forward(self._peers, node, request, CANNOT_START | {WRONG_NODE})

    async def _locate_again(
        self, target: RouteTarget, session_id: str, tried: str | None, refusal: Refusal | None
    ) -> str | None:
        """The node of a session that the tried node does not have, or does not start."""
        await self._peers.refresh(force=False)
        node_id = await self._locations.node_of(session_id, fresh=True)
        was_there = refusal is None or refusal.code != WRONG_NODE
        if node_id == tried and was_there and target.needs_instance and may_start.get():
            # If its files are in the blob store, another node can start it.
            await self._locations.reroute(session_id)
            node_id = await self._locations.node_of(session_id, fresh=True)
        return node_id

    # WebSockets

    async def _connect(
        self, session_id: str, node_id: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        proxy = WebSocketProxy(self._peers, scope, receive, send)
        try:
            check_origin(proxy.client, self._cors_origins)
            for _ in range(2):
                if node_id is None:
                    await self._app(scope, receive, send)
                    return
                node = self._peers.healthy(node_id)
                if node is not None and await proxy.run(node):
                    return
                await self._peers.refresh(force=False)
                node_id = await self._locations.node_of(session_id, fresh=True)
        except AtollError as error:
            await deny(proxy.client, problem(error), error)
            return
        failure = NodeNotReached("it does not respond", may_have_started=False)
        unreachable = _not_reached(session_id, failure)
        await deny(proxy.client, problem(unreachable), unreachable)


def _authorization(scope: Scope) -> str | None:
    value = header_of(scope, b"authorization")
    return None if value is None else value.decode("latin-1")


def _scheme(scope: Scope, scheme: str) -> str:
    if scope["type"] == "websocket":
        return {"http": "ws", "https": "wss"}[scheme]
    return scheme


def _session_in(data: bytes) -> str | None:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return None
    session_id = content.get("session_id") if isinstance(content, dict) else None
    return session_id if isinstance(session_id, str) else None


def _not_reached(session_id: str, failure: NodeNotReached) -> TemporaryError:
    message = f"Cannot reach the node of session {session_id}: {failure}."
    if failure.may_have_started:
        message += " It may have started to serve the request."
    return NodeUnreachable(message)
