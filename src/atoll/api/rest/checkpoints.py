"""Routes of checkpoints: copies of a session's workspace in the blob store."""

from __future__ import annotations

from fastapi import APIRouter, Request

from atoll.api.rest.responses import JsonResponse
from atoll.api.rest.schemas.checkpoints import CheckpointOut, checkpoint_out
from atoll.api.rest.services import services_of
from atoll.errors import CheckpointNotFound, NotFound

router = APIRouter(prefix="/sessions/{session_id}/checkpoint", tags=["checkpoints"])


@router.get("", responses={200: {"model": CheckpointOut}})
async def get_checkpoint(request: Request, session_id: str) -> JsonResponse:
    """Get the last checkpoint of a session. It exists for a while after the session's end."""
    found = await services_of(request).checkpoints.get(session_id)
    if found is None:
        raise _none(session_id)
    return JsonResponse(checkpoint_out(found))


@router.post("", responses={200: {"model": CheckpointOut}})
async def take_checkpoint(request: Request, session_id: str) -> JsonResponse:
    """Take a checkpoint now. It is complete when the response arrives."""
    found = await services_of(request).checkpoint_requests.take(session_id)
    if found is None:
        raise _none(session_id)
    return JsonResponse(checkpoint_out(found))


def _none(session_id: str) -> NotFound:
    return CheckpointNotFound(f"Session {session_id} has no checkpoint.")
