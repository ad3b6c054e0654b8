"""Asks other nodes to save the sessions that they have."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from typing import TYPE_CHECKING

import structlog

from atoll.errors import NodeUnreachable
from atoll.service.nodes.forward_token import Content, ForwardToken
from atoll.service.nodes.peers import FORWARD_HEADER

if TYPE_CHECKING:
    from collections.abc import Coroutine

    import httpx

    from atoll.model.session import Session
    from atoll.service.nodes.peers import Peers

log = structlog.get_logger(__name__)

caller_authorization: ContextVar[str | None] = ContextVar("caller_authorization", default=None)
"""The Authorization header of the current request, which requests to other nodes repeat."""


class RemoteCheckpoints:
    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    async def save(self, session: Session) -> None:
        """
        Have the session's node take a checkpoint now. Does nothing if the node does not answer:
        then the last checkpoint is used.
        """
        node = self._peers.healthy(session.runtime_node)
        if node is None:
            return
        import httpx  # Not before: most nodes are alone.

        path = f"/api/v1/sessions/{session.id}/checkpoint"
        token = ForwardToken(node.id, "http", Content.of(b""))
        headers = {FORWARD_HEADER: self._peers.sign(token, "POST", path.encode())}
        authorization = caller_authorization.get()
        if authorization is not None:
            headers["Authorization"] = authorization
        request = self._peers.client.post(node.url + path, headers=headers)
        try:
            response = await self._response(node.id, request)
        except httpx.TransportError as error:
            log.warning("peer.not_saved", session_id=session.id, node_id=node.id, error=str(error))
            return
        if response is None or response.is_success or response.status_code == httpx.codes.NOT_FOUND:
            return
        raise NodeUnreachable(
            f"Node {node.id} could not save session {session.id} ({response.status_code}).",
        )

    async def _response(
        self, node_id: str, request: Coroutine[None, None, httpx.Response]
    ) -> httpx.Response | None:
        """Null if the node is lost in the meantime."""
        asked = asyncio.ensure_future(request)
        lost = asyncio.ensure_future(self._peers.wait_until_lost(node_id))
        try:
            await asyncio.wait([asked, lost], return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        finally:
            for task in (asked, lost):
                task.cancel()
            await asyncio.gather(asked, lost, return_exceptions=True)
