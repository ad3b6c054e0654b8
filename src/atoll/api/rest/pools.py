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
    The warm pools of the control plane that answers: each has its own. Of the others of its node it
    tells how many instances they have ready.
    """
    states = await services_of(request).pool.list()
    return page_of([pool_out(state) for state in states], None)
