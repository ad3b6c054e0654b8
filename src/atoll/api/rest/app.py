"""The web application: routes, middleware and error handlers put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from atoll.api.rest import (
    build_contexts,
    checkpoints,
    contexts,
    dependencies,
    events,
    executions,
    files,
    health,
    html_pages,
    invocations,
    nodes,
    pools,
    problems,
    runtimes,
    secrets,
    sessions,
    signed_links,
    templates,
    volumes,
    webhooks,
)
from atoll.api.rest.execute_route import ExecuteRoute
from atoll.api.rest.forwarding.middleware import Forwarding
from atoll.api.rest.middleware.authentication import Authentication
from atoll.api.rest.middleware.bodies import BodyLimit, JsonByDefault, ValueLimit
from atoll.api.rest.middleware.client_limits import RequestLimit
from atoll.api.rest.middleware.idempotency import Idempotency
from atoll.api.rest.schemas.executions import Execute
from atoll.api.rest.schemas.problem import Problem
from atoll.api.rest.server.http_connections import connection_limit
from atoll.api.ws.console import ConsoleRoute
from atoll.errors import AtollError
from atoll.version import __version__

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from starlette.types import ASGIApp

    from atoll.api.rest.services import Services
    from atoll.service.auth.service import ApiKeys

PREFIX = "/api/v1"


def build(found: Services, keys: ApiKeys | None, registry: CollectorRegistry) -> ASGIApp:
    """The application; `keys` is none for the embedded one, which nobody else can reach."""
    app = FastAPI(
        title="Atoll",
        version=__version__,
        description="Runs the code that AI agents write: isolated, at once, on machines you own.",
        docs_url=None,
        redoc_url=None,
        strict_content_type=False,
        exception_handlers={
            AtollError: problems.on_atoll_error,
            RequestValidationError: problems.on_validation_error,
            HTTPException: problems.on_http_exception,
            Exception: problems.on_unexpected,
        },
    )
    app.state.services = found
    app.state.registry = registry
    app.include_router(health.router)
    app.include_router(html_pages.router)
    for module in (
        sessions,
        dependencies,
        secrets,
        executions,
        invocations,
        contexts,
        files,
        signed_links,
        checkpoints,
        templates,
        build_contexts,
        volumes,
        nodes,
        runtimes,
        events,
        webhooks,
        pools,
    ):
        app.include_router(module.router, prefix=PREFIX)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return _guarded(app, found, keys)


def _guarded(app: ASGIApp, found: Services, keys: ApiKeys | None) -> ASGIApp:
    """What every request passes on its way in, outermost last."""
    app = ConsoleRoute(ExecuteRoute(JsonByDefault(app), found), found)
    app = Idempotency(
        app,
        store=found.store,
        blobs=found.blobs,
        coordination=found.coordination,
        clock=found.clock,
        ttl=found.settings.idempotency_ttl,
    )
    app = Forwarding(app, found)
    app = ValueLimit(app)
    app = BodyLimit(app, limit=found.settings.max_body, upload_limit=found.settings.max_upload)
    app = RequestLimit(app, max(1, connection_limit(found.settings.connection) // 2))
    app = Authentication(app, keys)
    if found.settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=list(found.settings.cors_origins),
            allow_methods=["*"],
            allow_headers=[
                "Authorization",
                "Content-Type",
                "Idempotency-Key",
                "If-Match",
                "If-None-Match",
                "If-Range",
                "Last-Event-ID",
                "Prefer",
                "Range",
            ],
            expose_headers=[
                "Accept-Ranges",
                "Content-Disposition",
                "Content-Range",
                "ETag",
                "Idempotency-Replayed",
                "Retry-After",
            ],
        )
    return app


_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": (
        "Makes it safe to send the request again: with the same key and body it is done once, and "
        "its first answer is given again. 409 `idempotency_in_flight` while the first is being "
        "worked on; 422 `idempotency_key_reused` for another request with this key."
    ),
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """
    The generated schema, with the keys, the body of `execute` and the problem documents added.
    """
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        components = schema.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for model in (Execute, Problem):
            described = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(described.pop("$defs", {}))
            schemas[model.__name__] = described
        schemas.pop("HTTPValidationError", None)
        schemas.pop("ValidationError", None)
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"key": []}]
        answer = {
            "description": "A problem document.",
            "content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for path, operations in schema["paths"].items():
            for method, operation in operations.items():
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = answer
                if method == "post" and not path.startswith(problems.SIGNED):
                    operation.setdefault("parameters", []).append(_IDEMPOTENCY_KEY)
        app.openapi_schema = schema
    return app.openapi_schema
