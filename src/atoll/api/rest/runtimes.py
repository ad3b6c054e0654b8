"""Routes of nodes under their older name `runtimes`."""

from __future__ import annotations

from fastapi import APIRouter, Request

from atoll.api.rest.responses import JsonResponse, page_of
from atoll.api.rest.schemas.nodes import (
    RuntimeHealth,
    RuntimeMetrics,
    RuntimePage,
    runtime_health_out,
    runtime_metrics_out,
    runtime_out,
)
from atoll.api.rest.services import services_of

router = APIRouter(prefix="/runtimes", tags=["runtimes"])

UNKNOWN = "runtime_not_found"


@router.get("", responses={200: {"model": RuntimePage}})
async def list_runtimes(request: Request) -> JsonResponse:
    """List all nodes, ordered by id."""
    nodes = await services_of(request).nodes.list()
    return page_of([runtime_out(node) for node in nodes], None)


@router.get("/{runtime_id}/health", responses={200: {"model": RuntimeHealth}})
async def get_health(request: Request, runtime_id: str) -> JsonResponse:
    """Get whether the node is healthy, and which security requirements it meets."""
    node = await services_of(request).nodes.get(runtime_id, code=UNKNOWN)
    return JsonResponse(runtime_health_out(node))


@router.get("/{runtime_id}/metrics", responses={200: {"model": RuntimeMetrics}})
async def get_metrics(request: Request, runtime_id: str) -> JsonResponse:
    """Get the load of the node: CPU, memory, disk, sessions and ready instances."""
    node = await services_of(request).nodes.get(runtime_id, code=UNKNOWN)
    return JsonResponse(runtime_metrics_out(node))
