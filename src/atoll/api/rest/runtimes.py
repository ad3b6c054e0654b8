"""Nodes under the name that the first API gave them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request

from atoll.api.rest.answers import timestamp
from atoll.api.rest.nodes import node_out
from atoll.api.rest.responses import JsonResponse, page_of
from atoll.api.rest.schemas import RuntimeHealth, RuntimeMetrics, RuntimePage
from atoll.api.rest.services import services_of
from atoll.model.node import NodeStatus

if TYPE_CHECKING:
    from atoll.model.node import Node

router = APIRouter(prefix="/runtimes", tags=["runtimes"])

UNKNOWN = "runtime_not_found"
METRICS = (
    "id",
    "cpu_usage",
    "cpu_count",
    "load_average",
    "mem_usage",
    "mem_total",
    "disk_free",
    "session_count",
    "pool",
)


def _status(node: Node) -> str:
    cordoned = node.status is NodeStatus.HEALTHY and node.cordoned
    return "draining" if cordoned else node.status.value


@router.get("", responses={200: {"model": RuntimePage}})
async def list_runtimes(request: Request) -> JsonResponse:
    items = [
        {
            "id": node.id,
            "type": node.type,
            "url": node.url,
            "status": _status(node),
            "cpu_usage": 0.0 if node.metrics is None else round(node.metrics.cpu_usage, 4),
            "mem_usage": 0.0 if node.metrics is None else round(node.metrics.mem_usage, 4),
            "session_count": node.sessions,
            "max_sessions": node.max_sessions,
            "cached_templates": sorted({item.rpartition("@")[0] for item in node.templates}),
            "last_heartbeat": timestamp(node.seen_at),
            "failure_count": node.failures,
        }
        for node in await services_of(request).nodes.list()
    ]
    return page_of(items, None)


@router.get("/{runtime_id}/health", responses={200: {"model": RuntimeHealth}})
async def get_health(request: Request, runtime_id: str) -> JsonResponse:
    """Whether the node answers, and what isolation it gives."""
    node = await services_of(request).nodes.get(runtime_id, code=UNKNOWN)
    return JsonResponse(
        {
            "id": node.id,
            "status": _status(node),
            "problem": node.problem,
            "checked_at": timestamp(node.seen_at),
            "provides": node_out(node)["provides"],
            "missing": node.missing,
        }
    )


@router.get("/{runtime_id}/metrics", responses={200: {"model": RuntimeMetrics}})
async def get_metrics(request: Request, runtime_id: str) -> JsonResponse:
    told = node_out(await services_of(request).nodes.get(runtime_id, code=UNKNOWN))
    return JsonResponse({name: told[name] for name in METRICS})
