"""Routes of nodes: the places that host instances."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from atoll.api.rest.responses import JsonResponse, page_of
from atoll.api.rest.schemas.nodes import NodeOut, NodePage, node_out
from atoll.api.rest.services import services_of

router = APIRouter(prefix="/nodes", tags=["nodes"])


@router.get("", responses={200: {"model": NodePage}})
async def list_nodes(request: Request) -> JsonResponse:
    """List all nodes, ordered by id, with the state that each last reported."""
    return page_of([node_out(node) for node in await services_of(request).nodes.list()], None)


@router.get("/{node_id}", responses={200: {"model": NodeOut}})
async def get_node(request: Request, node_id: str) -> JsonResponse:
    """Get a node."""
    node = await services_of(request).nodes.get(node_id)
    return JsonResponse(node_out(node))


@router.post("/{node_id}/cordon", responses={200: {"model": NodeOut}})
async def cordon_node(request: Request, node_id: str) -> JsonResponse:
    """Close a node to new sessions. Its sessions stay."""
    node = await services_of(request).nodes.cordon(node_id)
    return JsonResponse(node_out(node))


@router.post("/{node_id}/uncordon", responses={200: {"model": NodeOut}})
async def uncordon_node(request: Request, node_id: str) -> JsonResponse:
    """Open a node to new sessions again. This also cancels a drain."""
    node = await services_of(request).nodes.uncordon(node_id)
    return JsonResponse(node_out(node))


@router.post("/{node_id}/drain", status_code=202, responses={202: {"model": NodeOut}})
async def drain_node(request: Request, node_id: str) -> JsonResponse:
    """
    Move the sessions of a node to other nodes, with their files. The node's `drain` shows the
    progress. 409 `drain_unavailable` if the files exist only on the node's disk or there is no
    other node.
    """
    node = await services_of(request).nodes.drain(node_id)
    return JsonResponse(node_out(node), 202)


@router.delete("/{node_id}", status_code=204)
async def delete_node(request: Request, node_id: str) -> Response:
    """
    Delete the record of a node that is lost or drained and has no sessions. If a replica still runs
    on the node, it registers the node again.
    """
    await services_of(request).nodes.remove(node_id)
    return Response(status_code=204)
