"""Routes of a session's secrets. Names can be read, values cannot."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request

from atoll.api.rest.responses import JsonResponse, page_of
from atoll.api.rest.schemas.secrets import SecretIn, SecretNames
from atoll.api.rest.schemas.types import ENV_NAME
from atoll.api.rest.services import services_of

router = APIRouter(prefix="/sessions/{session_id}/secrets", tags=["secrets"])

SecretName = Annotated[str, Path(pattern=ENV_NAME)]


@router.get("", responses={200: {"model": SecretNames}})
async def list_secrets(request: Request, session_id: str) -> JsonResponse:
    """List the names of a session's secrets."""
    return page_of(list(await services_of(request).secrets.names(session_id)), None)


@router.put("/{name}", responses={200: {"model": SecretNames}})
async def put_secret(
    request: Request, session_id: str, name: SecretName, body: SecretIn
) -> JsonResponse:
    """
    Create or replace a secret, for executions that start afterwards. Running executions and
    existing contexts keep the old value. Returns the names of all secrets.
    """
    value = body.value.get_secret_value()
    return page_of(list(await services_of(request).secrets.put(session_id, name, value)), None)


@router.delete("/{name}", responses={200: {"model": SecretNames}})
async def remove_secret(request: Request, session_id: str, name: SecretName) -> JsonResponse:
    """Delete a secret. Returns the names of the remaining secrets."""
    return page_of(list(await services_of(request).secrets.remove(session_id, name)), None)
