"""Routes of nodes, which the API calls runtimes."""

from __future__ import annotations

from fastapi import APIRouter, Request

from atoll.api.rest.answers import timestamp
from atoll.api.rest.context import Answer, page_answer, services
from atoll.api.rest.schemas import RuntimeHealth, RuntimeMetrics, RuntimePage

router = APIRouter(prefix="/runtimes", tags=["runtimes"])


@router.get("", responses={200: {"model": RuntimePage}})
async def list_runtimes(request: Request) -> Answer:
    items = [
        {
            "id": view.node.id,
            "type": view.node.type,
            "url": view.node.url,
            "status": view.status,
            "cpu_usage": round(view.metrics.cpu_usage, 4),
            "mem_usage": round(view.metrics.mem_usage, 4),
            "session_count": view.session_count,
            "max_sessions": None,
            "cached_templates": sorted(view.pool),
            "last_heartbeat": timestamp(view.seen_at),
            "failure_count": 0,
        }
        for view in await services(request).nodes.list()
    ]
    return page_answer(items, None)


@router.get("/{runtime_id}/health", responses={200: {"model": RuntimeHealth}})
async def get_health(request: Request, runtime_id: str) -> Answer:
    """Whether the node answers, and what isolation it gives."""
    view = await services(request).nodes.get(runtime_id)
    return Answer(
        {
            "id": view.node.id,
            "status": view.status,
            "problem": view.problem,
            "checked_at": timestamp(view.seen_at),
            "provides": sorted(view.capabilities.provides),
            "missing": view.capabilities.missing,
        }
    )


@router.get("/{runtime_id}/metrics", responses={200: {"model": RuntimeMetrics}})
async def get_metrics(request: Request, runtime_id: str) -> Answer:
    view = await services(request).nodes.get(runtime_id)
    return Answer(
        {
            "id": view.node.id,
            "cpu_usage": round(view.metrics.cpu_usage, 4),
            "cpu_count": view.metrics.cpu_count,
            "load_average": view.metrics.load_average,
            "mem_usage": round(view.metrics.mem_usage, 4),
            "mem_total": view.metrics.mem_total,
            "disk_free": view.metrics.disk_free,
            "session_count": view.session_count,
            "pool": view.pool,
        }
    )
