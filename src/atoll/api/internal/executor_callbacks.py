"""
Routes for callbacks of executors, below /internal.

They take the token of one instance instead of an API key, which is verified before any of the body
is read. CORS does not cover them, so web pages cannot call them.
"""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from atoll.api.rest import problems
from atoll.api.rest.headers import headers_of
from atoll.api.rest.middleware.bodies import BodyLimit
from atoll.api.rest.responses import JsonResponse
from atoll.errors import AtollError, Forbidden, InvalidRequest, Unauthenticated
from atoll.service.executions.event_log import MAX_RESULTS_SIZE

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from atoll.service.auth.executor_tokens import ExecutorTokens
    from atoll.service.executions.callbacks import ExecutorCallbacks
    from atoll.settings import ExecutionSettings

PREFIX = "/internal/"
MAX_OTHER_DATA = 8 * 1024 * 1024
"""Bytes of a result that are not output: artifacts, questions, the JSON around them."""
MAX_LOG_ENTRIES = 1_000_000

Number = Annotated[int, Field(ge=0, le=0xFFFF_FFFF)]


class ResultReport(BaseModel):
    model_config = ConfigDict(extra="ignore")

    result: dict[str, Any]
    log: Annotated[list[tuple[Number, Number, str]], Field(max_length=MAX_LOG_ENTRIES)] = []


class StatusReport(BaseModel):
    model_config = ConfigDict(extra="ignore")

    status: Annotated[str, Field(pattern="^running$")]


class ExecutorCallbackRoutes:
    """Serves paths below /internal and passes all other requests on."""

    def __init__(
        self,
        app: ASGIApp,
        callbacks: ExecutorCallbacks,
        tokens: ExecutorTokens,
        settings: ExecutionSettings,
    ) -> None:
        self._app = app
        self._tokens = tokens
        # Base64 takes a third more than the data; a factor of two leaves room for the JSON.
        output = 2 * settings.output_limit + settings.return_limit + MAX_RESULTS_SIZE
        limit = 2 * output + MAX_OTHER_DATA
        self._routes = BodyLimit(_routes(callbacks), limit=limit, upload_limit=limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._app(scope, receive, send)
            return
        try:
            scope["atoll.instance"] = self._tokens.verify(bearer(scope, "an instance's token"))
        except AtollError as error:
            await problems.problem(error)(scope, receive, send)
            return
        await self._routes(scope, receive, send)


def bearer(scope: Scope, what: str) -> str:
    """The bearer token of a request; `what` describes it for the error message."""
    for value in headers_of(scope, b"authorization"):
        kind, _, token = value.decode("latin-1").partition(" ")
        if kind.lower() == "bearer" and token.strip():
            return token.strip()
    raise Unauthenticated(
        f"This request needs {what}: send the header Authorization: Bearer <token>.",
        code="token_missing",
    )


def _routes(callbacks: ExecutorCallbacks) -> ASGIApp:
    async def ready(request: Request) -> Response:
        instance_id = _instance(request)
        if request.path_params["instance_id"] != instance_id:
            raise Forbidden("This token belongs to another instance.", code="token_of_another")
        await callbacks.ready(instance_id)
        return JsonResponse({})

    async def status(request: Request) -> Response:
        report = StatusReport.model_validate_json(await request.body())
        await callbacks.status(_instance(request), _execution(request), report.status)
        return JsonResponse({})

    async def heartbeat(request: Request) -> Response:
        await callbacks.heartbeat(_instance(request), _execution(request))
        return JsonResponse({})

    async def result(request: Request) -> Response:
        report = ResultReport.model_validate_json(await request.body())
        try:
            entries = [
                (sequence, channel, binascii.a2b_base64(data, strict_mode=True))
                for sequence, channel, data in report.log
            ]
        except ValueError as error:
            raise InvalidRequest(f"log: invalid base64: {error}.") from error
        stored = await callbacks.result(
            _instance(request), _execution(request), report.result, entries
        )
        return JsonResponse({"stored": stored})

    execution = "/internal/executions/{execution_id}"
    return Starlette(
        routes=[
            Route("/internal/instances/{instance_id}/ready", ready, methods=["POST"]),
            Route(f"{execution}/status", status, methods=["POST"]),
            Route(f"{execution}/heartbeat", heartbeat, methods=["POST"]),
            Route(f"{execution}/result", result, methods=["POST"]),
        ],
        exception_handlers={
            AtollError: problems.on_atoll_error,
            ValidationError: problems.on_validation_error,
            HTTPException: problems.on_http_exception,
            Exception: problems.on_unexpected,
        },
    )


def _instance(request: Request) -> str:
    return str(request.scope["atoll.instance"])


def _execution(request: Request) -> str:
    return str(request.path_params["execution_id"])
