"""
Requests about sessions of other nodes, answered by these.

Whoever is asked answers for every session: what is about one that another node has is passed on
there, with the caller's own key, and the answer passed back. A request is passed on at most once,
which its `Atoll-Hop` header says; who has such a request and not the session refuses it with
`wrong_node`, and where it came from looks again. What may have been begun is not repeated.

With one node, or a session that this process reaches, this costs a look at a dictionary.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from atoll.api.rest import host_header
from atoll.api.rest.forwarding.create import CreateForwarding
from atoll.api.rest.forwarding.proxy import (
    Body,
    ClientDisconnected,
    NodeNotReached,
    Refusal,
    RefusalFilter,
    pass_on,
    target_of,
)
from atoll.api.rest.forwarding.route_target import (
    PREFIX,
    READING,
    RouteTarget,
    TargetKind,
    target_of_request,
)
from atoll.api.rest.problems import problem
from atoll.api.ws.console import check_origin, deny
from atoll.api.ws.proxy import WebSocketProxy
from atoll.errors import AtollError, NodeUnreachable, TemporaryError
from atoll.service.nodes.forward_token import WRONG_NODE
from atoll.service.nodes.peers import FORWARD_HEADER
from atoll.service.nodes.remote_checkpoints import caller_authorization
from atoll.service.sessions.connections import may_start

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from atoll.api.rest.services import Services

HOP = FORWARD_HEADER.lower().encode()
FULL = ("engine_unavailable", "instance_not_started", "node_cordoned", "node_full")
"""How a node refuses to start a session that another one might."""
TRIES = 3


class Forwarding:
    """Belongs inside authentication and the limit of bodies, and outside of what is done once."""

    def __init__(self, app: ASGIApp, found: Services) -> None:
        self._app = app
        self._peers = found.peers
        self._locations = found.locations
        self._signed_urls = found.signed_urls
        self._origins = found.settings.cors_origins
        self._trusted_hosts = found.settings.trusted_hosts
        self._creation = CreateForwarding(app, found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        hop = next((value for name, value in scope["headers"] if name == HOP), None)
        if hop is None and self._peers.alone:
            await self._app(scope, receive, send)
            return
        caller_authorization.set(_authorization(scope))
        is_http = scope["type"] == "http"
        if hop is None and is_http and not host_header.is_own(scope, self._trusted_hosts):
            others = [(name, value) for name, value in scope["headers"] if name != b"host"]
            scope["headers"] = [*others, (b"host", host_header.UNKNOWN)]
        asked = target_of_request(scope.get("method", "GET"), scope["path"])
        try:
            if hop is not None:
                receive = await self._check_hop(hop, asked, scope, receive)
                scope[host_header.PASSED_ON] = True
                asked = None
            session_id = None if asked is None else await self._session(asked, scope)
            elsewhere = None if session_id is None else await self._locations.node_of(session_id)
        except ClientDisconnected:
            return
        except AtollError as error:
            if hop is not None:
                await problem(error)(scope, receive, send)
                return
            # The application tells what is wrong, or what it remembers.
            asked = session_id = elsewhere = None
        if asked is not None and scope["type"] == "http":
            if asked.kind in (TargetKind.CREATE, TargetKind.CLONE):
                await self._creation(asked, scope, receive, send)
                return
            if asked.kind is TargetKind.INVOKE:
                await self._invoke(asked, scope, receive, send)
                return
        here = elsewhere is None
        if here and session_id is not None and asked is not None and asked.needs_it:
            # Unless it runs, it may have to be started elsewhere.
            here = self._locations.is_connected(session_id)
        if here or asked is None or session_id is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._connect(session_id, elsewhere, scope, receive, send)
        else:
            body = Body(receive)
            await self._forward(asked, session_id, elsewhere, scope, body, send)

    async def _check_hop(
        self, value: bytes, asked: RouteTarget | None, scope: Scope, receive: Receive
    ) -> Receive:
        """Whether another node rightly takes this one for the one to answer, and for this body."""
        method = scope.get("method", "GET")
        hop = await self._peers.verify(value.decode("latin-1"), method, target_of(scope))
        scope["scheme"] = _scheme(scope, hop.scheme)
        if asked is not None:
            await self._check_place(asked, scope)
        if scope["type"] == "websocket":
            return receive
        body = Body(receive)
        await body.check(hop.content, scope["headers"])
        return body.receive if body.whole else receive

    async def _check_place(self, asked: RouteTarget, scope: Scope) -> None:
        session_id = await self._session(asked, scope)
        if session_id is None:
            return
        elsewhere = await self._locations.node_of(session_id, fresh=True)
        if elsewhere is not None:
            raise _wrong_node(f"Session {session_id} is on node {elsewhere}.")

    async def _session(self, asked: RouteTarget, scope: Scope) -> str | None:
        """The session that a request is about; None when any node can answer."""
        if asked.kind is TargetKind.SESSION:
            return asked.id
        if asked.kind is TargetKind.EXECUTION:
            return await self._locations.session_of_execution(asked.id)
        if asked.kind is TargetKind.INVOCATION:
            return await self._locations.session_of_invocation(asked.id)
        if asked.kind is TargetKind.SIGNED:
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            return (await self._signed_urls.verify(asked.id, method)).session_id
        return None

    # HTTP

    async def _invoke(self, asked: RouteTarget, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST invocations` names its session in the body."""
        body = Body(receive)
        try:
            await body.begin(limit=None)
        except ClientDisconnected:
            return
        session_id = _named_session(body.data)
        elsewhere = None
        if session_id is not None:
            try:
                elsewhere = await self._locations.node_of(session_id)
            except AtollError:
                elsewhere = None
        if session_id is None:
            await self._app(scope, body.receive, send)
        else:
            await self._forward(asked, session_id, elsewhere, scope, body, send)

    async def _forward(
        self,
        asked: RouteTarget,
        session_id: str,
        node_id: str | None,
        scope: Scope,
        body: Body,
        send: Send,
    ) -> None:
        """Have it answered by a node, or here where that is None; and by the next if need be."""
        refusal: Refusal | None = None
        failure = NodeNotReached("it moves from node to node", begun=False)
        try:
            await body.begin()
            if not body.whole and node_id is not None:
                # It can be sent once only: better to be sure of where to.
                node_id = await self._locations.node_of(session_id, fresh=True)
            for _ in range(TRIES):
                before, refusal = node_id, None
                try:
                    refusal = await self._try(node_id, scope, body, send)
                    if refusal is None:
                        return
                except NodeNotReached as error:
                    failure = error
                may_be_repeated = refusal is not None or not failure.begun
                if body.spent or not (may_be_repeated or scope["method"] in READING):
                    break
                node_id = await self._now_at(asked, session_id, before, refusal)
                if node_id == before and (refusal is not None or not failure.begun):
                    break
        except ClientDisconnected:
            return
        except TemporaryError as error:
            await problem(error)(scope, body.receive, send)
            return
        if refusal is not None and refusal.code != WRONG_NODE:
            await refusal.tell(send)
        elif asked.falls_back and not body.spent:
            # What the database can tell it tells; the rest says itself where the session is.
            body.again()
            await self._app(scope, body.receive, send)
        else:
            await problem(_not_reached(session_id, failure))(scope, body.receive, send)

    async def _try(
        self, node_id: str | None, scope: Scope, body: Body, send: Send
    ) -> Refusal | None:
        if node_id is None:
            body.again()
            held = RefusalFilter(send, FULL)
            await self._app(dict(scope), body.receive, held.send)
            return held.refusal
        node = self._peers.healthy(node_id)
        if node is None:
            raise NodeNotReached(f"node {node_id} is not known to answer", begun=False)
        return await pass_on(self._peers, node, scope, body, send, (WRONG_NODE, *FULL))

    async def _now_at(
        self, asked: RouteTarget, session_id: str, before: str | None, refusal: Refusal | None
    ) -> str | None:
        """Where a session is that was not found, or not started, at a node."""
        await self._peers.refresh(force=False)
        now_at = await self._locations.node_of(session_id, fresh=True)
        lost = refusal is None or refusal.code != WRONG_NODE
        if now_at == before and lost and asked.needs_it and may_start.get():
            # One that waits in the blob store can be started elsewhere.
            await self._locations.reroute(session_id)
            now_at = await self._locations.node_of(session_id, fresh=True)
        return now_at

    # WebSockets

    async def _connect(
        self, session_id: str, node_id: str | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        socket = WebSocketProxy(self._peers, scope, receive, send)
        try:
            check_origin(socket.client, self._origins)
            for _ in range(2):
                if node_id is None:
                    await self._app(scope, receive, send)
                    return
                node = self._peers.healthy(node_id)
                if node is not None and await socket.run(node):
                    return
                await self._peers.refresh(force=False)
                node_id = await self._locations.node_of(session_id, fresh=True)
        except AtollError as error:
            await deny(socket.client, problem(error), error)
            return
        refusal = _not_reached(session_id, NodeNotReached("it does not answer", begun=False))
        await deny(socket.client, problem(refusal), refusal)


def _authorization(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            found: str = value.decode("latin-1")
            return found
    return None


def _scheme(scope: Scope, scheme: str) -> str:
    if scope["type"] == "websocket":
        return {"http": "ws", "https": "wss"}[scheme]
    return scheme


def _named_session(data: bytes) -> str | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    named = found.get("session_id") if isinstance(found, dict) else None
    return named if isinstance(named, str) else None


def _wrong_node(words: str) -> TemporaryError:
    return TemporaryError(words, code=WRONG_NODE)


def _not_reached(session_id: str, failure: NodeNotReached) -> TemporaryError:
    words = f"The node of session {session_id} cannot be reached: {failure}."
    if failure.begun:
        words += " It may have begun with what was asked."
    return NodeUnreachable(words)
