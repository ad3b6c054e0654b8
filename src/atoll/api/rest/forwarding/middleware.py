"""
Lets requests about sessions of other nodes through to `routing`, and all others to the application.

With one node this costs a comparison, and what forwarding needs is not even imported.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from atoll.api.rest.forwarding.route_target import PREFIX
from atoll.api.rest.headers import header_of
from atoll.service.nodes.peers import FORWARD_HEADER

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from atoll.api.rest.services import Services

FORWARD_TOKEN = FORWARD_HEADER.lower().encode()


class Forwarding:
    """
    Belongs inside authentication and the body limit, and outside of idempotency, which is the job
    of the node that serves the request.
    """

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] in ("http", "websocket")
            and scope["path"].startswith(PREFIX)
            and not (header_of(scope, FORWARD_TOKEN) is None and self._services.peers.alone)
        ):
            await self._routing(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @cached_property
    def _routing(self) -> ASGIApp:
        from atoll.api.rest.forwarding.routing import SessionRouting

        return SessionRouting(self._app, self._services)
