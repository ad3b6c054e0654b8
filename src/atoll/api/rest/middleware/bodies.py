"""Bounds of request bodies, and their content type."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from atoll.api.rest.headers import header_of
from atoll.api.rest.problems import SIGNED, problem
from atoll.errors import TooLarge
from atoll.model.json_size import has_at_most

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
FORM = b"application/x-www-form-urlencoded"
MAX_VALUES = 100_000
"""JSON values of a request body, object keys included."""
_BUILD_CONTEXTS = "/api/v1/build-contexts/"


def is_upload(scope: Any) -> bool:
    """Whether the body is a file, which may be large and slow."""
    path: str = scope["path"]
    if path.startswith((SIGNED, _BUILD_CONTEXTS)):
        return bool(scope["method"] == "PUT")
    if "/files" not in path or not path.startswith("/api/v1/sessions/"):
        return False
    return scope["method"] == "PUT" or path.endswith("/files/upload")


class ClientDisconnected(Exception):
    """The client left before its request was complete."""


async def read_body(receive: Receive) -> bytes:
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` for a request whose body has been read."""
    buffered: Message | None = {"type": "http.request", "body": body, "more_body": False}
    del body  # Kept by nothing but the message, which the application takes.

    async def replayed() -> Message:
        nonlocal buffered
        if buffered is None:
            return await receive()
        message, buffered = buffered, None
        return message

    return replayed


class JsonByDefault:
    """
    Treats form bodies as JSON: `curl -d` calls every body a form, and the API has no forms. Web
    pages gain nothing by it, because every request needs the Authorization header.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in SAFE_METHODS and not is_upload(scope):
            scope["headers"] = [
                (name, b"application/json" if name == b"content-type" and value == FORM else value)
                for name, value in scope["headers"]
            ]
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses a body above the limit: by Content-Length at once, else as soon as it gets there."""

    def __init__(self, app: ASGIApp, *, limit: int, upload_limit: int) -> None:
        self._app = app
        self._limit = limit
        self._upload_limit = upload_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS:
            await self._app(scope, receive, send)
            return
        limit = self._upload_limit if is_upload(scope) else self._limit
        length = header_of(scope, b"content-length")
        if length is not None and length.isdigit() and int(length) > limit:
            await problem(_too_large(limit))(scope, receive, send)
            return
        received, responded = 0, False

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
            return message

        async def guarded_send(message: Message) -> None:
            # The application may respond with another error, for the exception that it gets.
            nonlocal responded
            if responded or received <= limit:
                responded = True
                await send(message)

        with contextlib.suppress(TooLarge):
            await self._app(scope, counted_receive, guarded_send)
        if not responded:
            await problem(_too_large(limit))(scope, receive, send)


class ValueLimit:
    """
    Refuses JSON with very many values before it is parsed: parsing would block the event loop and
    take much more memory than the body. A body that is too short for so many is not buffered.
    """

    def __init__(self, app: ASGIApp, limit: int = MAX_VALUES) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS or self._is_short(scope):
            await self._app(scope, receive, send)
            return
        try:
            body = await read_body(receive)
        except ClientDisconnected:
            return
        if not has_at_most(body, self._limit):
            await problem(_too_many_values(self._limit))(scope, receive, send)
            return
        receive = replay(body, receive)
        del body
        await self._app(scope, receive, send)

    def _is_short(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"content-length":
                return (value.isdigit() and int(value) <= self._limit) or is_upload(scope)
            if name == b"transfer-encoding":
                return is_upload(scope)
        return True


def _too_many_values(limit: int) -> TooLarge:
    return TooLarge(
        f"The request body has more than {limit} JSON values. Send large data as a file.",
        code="too_many_values",
    )


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The request body is larger than {limit} bytes.", code="body_too_large")
