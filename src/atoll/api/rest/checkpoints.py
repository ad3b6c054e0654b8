"""Routes of checkpoints: a session's files in the blob store."""

from __future__ import annotations

from fastapi import APIRouter, Request

from atoll.api.rest.responses import JsonResponse
from atoll.api.rest.schemas.checkpoints import CheckpointOut, checkpoint_out
from atoll.api.rest.services import services_of
from atoll.errors import CheckpointNotFound, NotFound

router = APIRouter(prefix="/sessions/{session_id}/checkpoint", tags=["checkpoints"])


@router.get("", responses={200: {"model": CheckpointOut}})
async def get_checkpoint(request: Request, session_id: str) -> JsonResponse:
    """The last time that the session's files were saved; also after its end, for a while."""
    found = await services_of(request).checkpoints.get(session_id)
    if found is None:
        raise _none(session_id)
    return JsonResponse(checkpoint_out(found))


@router.post("", responses={200: {"model": CheckpointOut}})
async def take_checkpoint(request: Request, session_id: str) -> JsonResponse:
    """Save the session's files now; it is done when this answers."""
    found = await services_of(request).autosave.save_now(session_id)
    if found is None:
        raise _none(session_id)
    return JsonResponse(checkpoint_out(found))


def _none(session_id: str) -> NotFound:
    return CheckpointNotFound(f"No files of session {session_id} are in the blob store.")
