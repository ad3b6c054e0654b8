"""
Who may call, and how much they may send. Pure ASGI: a base class would cost more than the request.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from atoll.api.rest import html_pages
from atoll.api.rest.problems import SIGNED, problem
from atoll.errors import AtollError, Forbidden, TemporaryError, TooLarge, Unauthenticated
from atoll.model.json_size import at_most
from atoll.model.key import Scope
from atoll.service.sessions.start import may_start

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Send
    from starlette.types import Scope as ASGIScope

    from atoll.service.auth.service import ApiKeys

OPEN_PATHS = html_pages.PATHS | {"/health", "/ready", "/openapi.json"}
FORM = b"application/x-www-form-urlencoded"
KEY_PROTOCOL = "atoll.key."
EVENTS = "/api/v1/events"
"""The feed, which has no end."""
MAX_VALUES = 100_000
"""JSON values of a request, keys among them."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Authentication:
    """
    A key on every request but the probes, the pages and signed links. None at all when
    `keys` is none.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._keys is None:
            await self._app(scope, receive, send)
            return
        if scope["path"] in OPEN_PATHS or scope["path"].startswith(SIGNED):
            # A signed link is checked by its own route.
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
                "This needs an API key, as the header Authorization: Bearer <key>.",
                code="key_missing",
            )
        key = await keys.find(secret)
        if key is None:
            raise Unauthenticated("This API key is not known.", code="key_unknown")
        if key.scope is Scope.READ and scope.get("method", "GET") not in SAFE_METHODS:
            raise Forbidden("This API key may only read.", code="key_read_only")
        scope["atoll.key"] = key.id
        scope["atoll.read_only"] = key.scope is Scope.READ
        may_start.set(key.scope is not Scope.READ)
        if scope["type"] == "websocket" or scope["path"] == EVENTS:
            # What lasts asks now and then whether it may go on.
            scope["atoll.recheck"] = lambda: self._check(scope, keys)


def _secret(scope: ASGIScope) -> str:
    """
    The key as the header has it. A web page cannot set that on a WebSocket: from there it comes as
    one of the subprotocols that are offered, and is never the one that is chosen.
    """
    secret, seen = "", False
    for name, value in scope["headers"]:
        if name == b"authorization":
            if seen:
                # A proxy, or the node that this is passed on to, could take another of them.
                raise Unauthenticated(
                    "A request has one Authorization header, and this one has more.",
                    code="key_ambiguous",
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


class ShutdownResponse:
    """
    An answer for those who still wait when a server that ends has given them all its time: it then
    cancels them, which would be told as an error of its own.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, may_end = False, False

        async def answer(message: Message) -> None:
            nonlocal begun, may_end
            if message["type"] == "http.response.start":
                begun = True
                may_end = all(name.lower() != b"content-length" for name, _ in message["headers"])
            elif not message.get("more_body"):
                may_end = False
            await send(message)

        try:
            await self._app(scope, receive, answer)
        except asyncio.CancelledError:
            if not begun:
                await problem(_completions())(scope, receive, send)
            elif may_end:
                # Events: whoever reads them comes back with the last number.
                await send({"type": "http.response.body", "body": b""})
            else:
                raise


def _completions() -> TemporaryError:
    return TemporaryError(
        "This server ends. What was asked for may be under way: ask for it by its id, or send the "
        "same again if it has an id or a key of yours.",
        code="shutting_down",
    )


class JsonByDefault:
    """
    Takes a body for JSON where a hasty client, `curl -d` for one, calls it a form: there are no
    forms here. No web page gains by it, as every request needs the Authorization header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS and not is_upload(scope):
            scope["headers"] = [
                (name, b"application/json" if name == b"content-type" and value == FORM else value)
                for name, value in scope["headers"]
            ]
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses a body beyond the limit: by its announced length at once, else when it gets there."""

    def __init__(self, app: ASGIApp, *, limit: int, upload_limit: int) -> None:
        self._app = app
        self._limit = limit
        self._upload_limit = upload_limit

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        limit = self._upload_limit if is_upload(scope) else self._limit
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                await problem(_too_large(limit))(scope, receive, send)
                return
        received, answered = 0, False

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
            return message

        async def answer(message: Message) -> None:
            """Whatever the application makes of the error, it is this one."""
            nonlocal answered
            if answered or received <= limit:
                answered = True
                await send(message)

        with contextlib.suppress(TooLarge):
            await self._app(scope, counted, answer)
        if not answered:
            await problem(_too_large(limit))(scope, receive, send)


class ValueLimit:
    """
    Refuses JSON of very many values before it is parsed: that takes the event loop, and much more
    memory than the body. A body that is too short for so many passes as it comes.
    """

    def __init__(self, app: ASGIApp, limit: int = MAX_VALUES) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS or self._is_short(scope):
            await self._app(scope, receive, send)
            return
        pieces: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            pieces.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(pieces)
        pieces.clear()
        if not at_most(body, self._limit):
            await problem(_too_many_values(self._limit))(scope, receive, send)
            return
        whole: Message | None = {"type": "http.request", "body": body, "more_body": False}
        del body

        async def again() -> Message:
            nonlocal whole
            if whole is None:
                return await receive()
            message, whole = whole, None
            return message

        await self._app(scope, again, send)

    def _is_short(self, scope: ASGIScope) -> bool:
        for name, value in scope["headers"]:
            if name == b"content-length":
                return (value.isdigit() and int(value) <= self._limit) or is_upload(scope)
            if name == b"transfer-encoding":
                return is_upload(scope)
        return True


def _too_many_values(limit: int) -> TooLarge:
    return TooLarge(
        f"The body has more than {limit} JSON values. Send large data as a file.",
        code="too_many_values",
    )


def _too_large(limit: int) -> TooLarge:
    return TooLarge(
        f"The body is larger than the {limit} bytes allowed here.", code="body_too_large"
    )


CONTEXTS = "/api/v1/build-contexts/"


def is_upload(scope: Any) -> bool:
    """Whether the body is a file, which may be large and slow."""
    path: str = scope["path"]
    if path.startswith((SIGNED, CONTEXTS)):
        return bool(scope["method"] == "PUT")
    if "/files" not in path or not path.startswith("/api/v1/sessions/"):
        return False
    return scope["method"] == "PUT" or path.endswith("/files/upload")
