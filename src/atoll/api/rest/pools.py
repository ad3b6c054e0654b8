"""Routes of warm pools."""

from __future__ import annotations

from fastapi import APIRouter, Request

from atoll.api.rest.answers import pool_out
from atoll.api.rest.context import Answer, page_answer, services
from atoll.api.rest.schemas import PoolPage

router = APIRouter(prefix="/pools", tags=["pools"])


@router.get("", responses={200: {"model": PoolPage}})
async def list_pools(request: Request) -> Answer:
    """
    The warm pools of the control plane that answers: each has its own. Of the others of its node it
    tells how many instances they have ready.
    """
    states = await services(request).pool.states()
    return page_answer([pool_out(state) for state in states], None)
