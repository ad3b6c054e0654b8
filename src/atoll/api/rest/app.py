"""The web application: routes and middleware put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.api.rest.direct_routes import DirectRoutes
from atoll.api.rest.execute_route import ExecuteRoute
from atoll.api.rest.forwarding.middleware import Forwarding
from atoll.api.rest.middleware.authentication import Authentication
from atoll.api.rest.middleware.bodies import BodyLimit, JsonByDefault, ValueLimit
from atoll.api.rest.middleware.client_limits import RequestLimit
from atoll.api.rest.middleware.idempotency import Idempotency
from atoll.api.rest.server.open_files import connection_limit
from atoll.api.ws.console import ConsoleRoute

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from atoll.api.rest.services import Services
    from atoll.service.auth.service import ApiKeys


def build(documented: ASGIApp, services: Services, keys: ApiKeys | None) -> ASGIApp:
    """
    Everything around the documented routes, innermost first. Without `keys`, in the embedded mode,
    requests need no API key.
    """
    settings = services.settings
    app: ASGIApp = DirectRoutes(JsonByDefault(documented), services)
    app = ConsoleRoute(ExecuteRoute(app, services), services)
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
        from starlette.middleware.cors import CORSMiddleware

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
