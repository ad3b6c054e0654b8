"""The routes of the OpenAPI document: a FastAPI application. Imported by `lazy_routes` alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

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
    prometheus,
    runtimes,
    secrets,
    sessions,
    signed_links,
    templates,
    volumes,
    webhooks,
)
from atoll.api.rest.schemas.execution_requests import Execute
from atoll.errors import AtollError
from atoll.version import __version__

if TYPE_CHECKING:
    from atoll.api.rest.metrics_sources import MetricsSources
    from atoll.api.rest.services import Services

PREFIX = "/api/v1"


def build(services: Services, metrics: MetricsSources) -> FastAPI:
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
    app.state.registry = CollectorRegistry()
    prometheus.register(app.state.registry, metrics)
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
