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
from atoll.api.rest.schemas.execution_requests import Execute
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


def build(services: Services, keys: ApiKeys | None, registry: CollectorRegistry) -> ASGIApp:
    """The application. Without `keys`, in the embedded mode, requests need no API key."""
    app = FastAPI(
        title="Atoll",
        version=__version__,
        description="Runs code that AI agents write: isolated, at once, on machines that you own.",
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
    app.state.services = services
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
    return _with_middleware(app, services, keys)


def _with_middleware(app: ASGIApp, services: Services, keys: ApiKeys | None) -> ASGIApp:
    """Middleware in the order of its nesting, innermost first."""
    settings = services.settings
    app = ConsoleRoute(ExecuteRoute(JsonByDefault(app), services), services)
    app = Idempotency(
        app,
        store=services.store,
        blobs=services.blobs,
        coordination=services.coordination,
        clock=services.clock,
        ttl=settings.idempotency_ttl,
    )
    app = Forwarding(app, services)
    app = ValueLimit(app)
    app = BodyLimit(app, limit=settings.max_body, upload_limit=settings.max_upload)
    app = RequestLimit(app, max(1, connection_limit(settings.connection) // 2))
    app = Authentication(app, keys)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=list(settings.cors_origins),
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
        "Makes it safe to repeat the request: with the same key and body it is served once, and "
        "its first response is returned again. 409 `idempotency_in_flight` while the first request "
        "is in progress; 422 `idempotency_key_reused` if the key was used for a different request."
    ),
    "schema": {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[!-~]+$"},
}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """
    The generated document, plus authentication, the body of `execute` and the problem documents.
    """
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        components = schema.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        for model in (Execute, problems.Problem):
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
