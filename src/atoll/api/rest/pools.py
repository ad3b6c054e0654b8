"""Routes of warm pools."""

from __future__ import annotations

from fastapi import APIRouter, Request

from atoll.api.rest.responses import JsonResponse, page_of
from atoll.api.rest.schemas.pools import PoolPage, pool_out
from atoll.api.rest.services import services_of

router = APIRouter(prefix="/pools", tags=["pools"])


@router.get("", responses={200: {"model": PoolPage}})
async def list_pools(request: Request) -> JsonResponse:
    """
    List the warm pools of the replica that serves this request; each replica has its own. `others`
    counts the ready instances of the other replicas of its node.
    """
    states = await services_of(request).pool.list()
    return page_of([pool_out(state) for state in states], None)
