"""
`POST sessions/{id}/execute`, straight on ASGI.

It is the hot path: the framework's routing, dependency injection and response classes would take
longer than the rest of the request. The documented route calls the same function.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from atoll import ids
from atoll.api.rest.headers import headers_of
from atoll.api.rest.middleware.backpressure import may_be_large, offer_short_response
from atoll.api.rest.middleware.bodies import ClientDisconnected, read_body
from atoll.api.rest.problems import invalid, on_unexpected, problem
from atoll.api.rest.responses import encode_json
from atoll.api.rest.schemas.execution_requests import Execute
from atoll.api.rest.schemas.executions import result_out, submitted_out
from atoll.errors import AtollError, InvalidRequest
from atoll.service.executions.offload import size_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from atoll.api.rest.services import Services

MAX_DESCRIBED_ERRORS = 1000
_WAIT = re.compile(
    rb"(?:^|[,;])\s*wait\s*=\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*(?:[,;]|$)", re.IGNORECASE
)
PREFIX, SUFFIX = "/api/v1/sessions/", "/execute"


async def execute(
    services: Services, session_id: str, data: bytes, scope: Scope
) -> tuple[int, dict[str, Any]]:
    """Returns the status code and the content of the response."""
    try:
        body = Execute.model_validate_json(data)
    except ValidationError as error:
        if error.error_count() > MAX_DESCRIBED_ERRORS:
            # Describing a hundred thousand would take half a second.
            raise InvalidRequest(
                f"{error.error_count()} fields are invalid.", code="invalid_request"
            ) from None
        raise invalid(list(error.errors(include_url=False, include_input=False))) from None
    seed: ids.Seed | None = scope.get("atoll.seed")
    seeded = None if seed is None else ids.execution_id(seed.at, seed)
    running = await services.executions.submit(
        session_id,
        body.request(services.settings.execution.timeout.total_seconds()),
        execution_id=body.execution_id or seeded,
    )
    wait = body.wait or preferred_wait(scope)
    if wait:
        execution = await services.executions.await_end(running, wait)
        if execution.outcome is not None:
            if may_be_large(size_of(execution.outcome)):
                offer_short_response(scope, submitted_out(execution), 202)
            return 200, result_out(execution, execution.outcome)
    return 202, submitted_out(running.execution)


def preferred_wait(scope: Scope) -> float:
    """Seconds of `Prefer: wait=…` (RFC 7240); 0 without that header."""
    for value in headers_of(scope, b"prefer"):
        if match := _WAIT.search(value):
            return float(match[1])
    return 0.0


class ExecuteRoute:
    """Serves `execute` and passes all other requests on."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        session_id = path[len(PREFIX) : -len(SUFFIX)]
        if not path.startswith(PREFIX) or not path.endswith(SUFFIX) or "/" in session_id:
            await self._app(scope, receive, send)
            return
        try:
            data = await read_body(receive)
            status, answer = await execute(self._services, session_id, data, scope)
            content = encode_json(answer)
            del answer  # It would stay in memory beside its encoding while the client reads.
        except ClientDisconnected:
            return
        except AtollError as error:
            await problem(error)(scope, receive, send)
            return
        except Exception as error:  # noqa: BLE001 - logged by on_unexpected
            await (await on_unexpected(path, error))(scope, receive, send)
            return
        length = str(len(content)).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})
