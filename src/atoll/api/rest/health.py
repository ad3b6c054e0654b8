"""Health checks, and metrics for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from atoll.api.rest import direct_routes
from atoll.api.rest.responses import JsonResponse
from atoll.api.rest.services import services_of

router = APIRouter(tags=["probes"])


@router.get("/health")
async def health() -> Response:
    """Check that this process responds."""
    return direct_routes.health()


@router.get("/ready")
async def ready(request: Request) -> JsonResponse:
    """Check that the database responds too; 503 if it does not."""
    await services_of(request).store.ping()
    return JsonResponse({"status": "ready"})


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Get metrics in the Prometheus text format."""
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)
