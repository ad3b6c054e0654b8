"""
The other routes of a program that runs code, straight on ASGI: create and delete a session, and
follow an execution.

An embedded Atoll is ready long before the framework is imported, and such a program never needs it.
Only plain requests are served here: one with a query or with an invalid body goes on to the
documented route, which calls the same function, or describes the error.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pydantic import ValidationError

from atoll import ids
from atoll.api.rest import sse
from atoll.api.rest.headers import headers_of
from atoll.api.rest.middleware.bodies import FORM, ClientDisconnected, read_body, replay
from atoll.api.rest.middleware.client_limits import key_of
from atoll.api.rest.problems import on_unexpected, problem
from atoll.api.rest.responses import JsonResponse
from atoll.api.rest.schemas.sessions import CreateSession, session_out
from atoll.errors import AtollError
from atoll.service.executions.offload import size_of
from atoll.version import __version__

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from atoll.api.rest.services import Services

_SESSIONS, _EXECUTIONS, _EVENTS = "/api/v1/sessions", "/api/v1/executions/", "/events"
_JSON = (b"application/json", FORM)
_MAX_NUMBER = 15
"""Digits of an event's number."""


async def create_session(
    services: Services, body: CreateSession, scope: Scope, *, wait: bool = True
) -> Response:
    seed: ids.Seed | None = scope.get("atoll.seed")
    session = await services.sessions.create(
        body.new_session(), session_id=None if seed is None else ids.session_id(seed), wait=wait
    )
    return JsonResponse(session_out(session), 201)


async def delete_session(services: Services, session_id: str) -> Response:
    return JsonResponse(session_out(await services.sessions.delete(session_id)))


async def execution_events(
    services: Services, execution_id: str, scope: Scope, last_event_id: int
) -> Response:
    execution = await services.executions.get(execution_id)
    reservations = [services.streams.open(scope)]
    if execution.outcome is not None:
        # The replayed output stays in memory while the client reads.
        size = size_of(execution.outcome)
        try:
            reservations.append(services.response_memory.reserve(key_of(scope), size))
        except AtollError:
            reservations[0].close()
            raise
    return sse.event_stream(services.executions.events(execution_id, last_event_id), *reservations)


def health() -> Response:
    return JsonResponse({"status": "ok", "version": __version__})


class _NotPlain(Exception):
    """The documented route has to serve the request."""


class DirectRoutes:
    """Serves plain requests and passes all others on."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._route(scope)
        if route is None:
            await self._app(scope, receive, send)
            return
        body = b""
        try:
            if scope["method"] == "POST":
                body = await read_body(receive)
            response = await route(scope, body)
        except ClientDisconnected:
            return
        except _NotPlain:
            await self._app(scope, replay(body, receive), send)
            return
        except AtollError as error:
            response = problem(error)
        except Exception as error:  # noqa: BLE001 - logged by on_unexpected
            response = await on_unexpected(scope["path"], error)
        try:
            await response(scope, receive, send)
        except Exception as error:
            # Too late for another response: the client sees one that ends early.
            await on_unexpected(scope["path"], error)
            raise

    def _route(self, scope: Scope) -> Callable[[Scope, bytes], Awaitable[Response]] | None:
        if scope["type"] != "http" or scope["query_string"]:
            return None
        method, path = scope["method"], scope["path"]
        if method == "POST" and path == _SESSIONS:
            return self._create_session
        if method == "DELETE" and _middle(path, f"{_SESSIONS}/", ""):
            return self._delete_session
        if method == "GET" and _middle(path, _EXECUTIONS, _EVENTS):
            return self._execution_events
        if method == "GET" and path == "/health":
            return self._health
        return None

    async def _create_session(self, scope: Scope, data: bytes) -> Response:
        if any(kind not in _JSON for kind in headers_of(scope, b"content-type")):
            raise _NotPlain
        try:
            body = CreateSession.model_validate(json.loads(data) if data else {})
        except (ValidationError, ValueError, RecursionError):
            raise _NotPlain from None
        return await create_session(self._services, body, scope)

    async def _delete_session(self, scope: Scope, data: bytes) -> Response:
        return await delete_session(self._services, _middle(scope["path"], f"{_SESSIONS}/", ""))

    async def _execution_events(self, scope: Scope, data: bytes) -> Response:
        execution_id = _middle(scope["path"], _EXECUTIONS, _EVENTS)
        last = headers_of(scope, b"last-event-id") or [b"0"]
        if len(last) > 1 or not last[0].isdigit() or len(last[0]) > _MAX_NUMBER:
            raise _NotPlain
        return await execution_events(self._services, execution_id, scope, int(last[0]))

    async def _health(self, scope: Scope, data: bytes) -> Response:
        return health()


def _middle(path: str, prefix: str, suffix: str) -> str:
    """What one segment between them is; empty if the path is another one."""
    segment = path[len(prefix) : len(path) - len(suffix)]
    matches = path.startswith(prefix) and path.endswith(suffix) and "/" not in segment
    return segment if matches else ""
