"""
Checks the API key of every request. Pure ASGI: a base class would cost more than the request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.api.rest.middleware.bodies import SAFE_METHODS
from atoll.api.rest.problems import SIGNED, problem
from atoll.errors import AtollError, Forbidden, Unauthenticated
from atoll.model.api_key import Scope
from atoll.service.sessions.start import may_start

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Send
    from starlette.types import Scope as ASGIScope

    from atoll.service.auth.service import ApiKeys

HTML_PAGES = frozenset(
    {"/", "/docs", "/docs/start.js", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js"}
)
OPEN_PATHS = HTML_PAGES | {"/health", "/ready", "/openapi.json"}
KEY_PROTOCOL = "atoll.key."
"""Prefix of the WebSocket subprotocol that carries a key."""
EVENTS = "/api/v1/events"


class Authentication:
    """
    Demands a key for everything but health checks, HTML pages and signed links, which their route
    verifies. Without `keys`, in the embedded mode, nothing needs one.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._keys is None:
            await self._app(scope, receive, send)
            return
        if scope["path"] in OPEN_PATHS or scope["path"].startswith(SIGNED):
            await self._app(scope, receive, send)
            return
        try:
            await self._check(scope, self._keys)
        except AtollError as error:
            await problem(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _check(self, scope: ASGIScope, keys: ApiKeys) -> None:
        secret = _secret(scope)
        if not secret:
            raise Unauthenticated(
                "This request needs an API key: send the header Authorization: Bearer <key>.",
                code="key_missing",
            )
        key = await keys.find(secret)
        if key is None:
            raise Unauthenticated("Unknown API key.", code="key_unknown")
        if key.scope is Scope.READ and scope.get("method", "GET") not in SAFE_METHODS:
            raise Forbidden("This API key is read-only.", code="key_read_only")
        scope["atoll.key"] = key.id
        scope["atoll.read_only"] = key.scope is Scope.READ
        may_start.set(key.scope is not Scope.READ)
        if scope["type"] == "websocket" or scope["path"] == EVENTS:
            # These last: their routes check from time to time whether the key is still valid.
            scope["atoll.recheck"] = lambda: self._check(scope, keys)


def _secret(scope: ASGIScope) -> str:
    """
    The key in the Authorization header. A web page cannot set headers of a WebSocket, so there the
    key may be one of the offered subprotocols; that one is never selected.
    """
    secret, seen = "", False
    for name, value in scope["headers"]:
        if name == b"authorization":
            if seen:
                # A proxy, or the node that this is forwarded to, might read the other one.
                raise Unauthenticated(
                    "The request has more than one Authorization header.", code="key_ambiguous"
                )
            seen = True
            kind, _, secret = value.decode("latin-1").partition(" ")
            if kind.lower() != "bearer":
                secret = ""
    if not secret and scope["type"] == "websocket":
        for offered in scope.get("subprotocols", ()):
            if offered.startswith(KEY_PROTOCOL):
                secret = offered.removeprefix(KEY_PROTOCOL)
    return secret.strip()
