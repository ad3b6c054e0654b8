"""Routes of webhooks. Read-only API keys may not use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.responses import Response

from atoll.api.rest.responses import JsonResponse
from atoll.api.rest.schemas.webhooks import (
    ChangeWebhook,
    CreateWebhook,
    NewWebhook,
    TriedOut,
    WebhookList,
    WebhookOut,
    webhook_out,
)
from atoll.api.rest.services import services_of
from atoll.errors import Forbidden
from atoll.service.events.service import checked_types

if TYPE_CHECKING:
    from atoll.service.webhooks.service import Webhooks

router = APIRouter(prefix="/webhooks", tags=["webhooks"])


def _webhooks(request: Request) -> Webhooks:
    """URLs may contain secrets, so read-only keys may not see them."""
    if request.scope.get("atoll.read_only", False):
        raise Forbidden("This API key is read-only and may not see webhooks.", code="key_read_only")
    return services_of(request).webhooks


@router.post("", status_code=201, responses={201: {"model": NewWebhook}})
async def create_webhook(request: Request, body: CreateWebhook) -> JsonResponse:
    """
    Register a URL to which future events are posted. The response contains the secret that signs
    deliveries, if the server generated it.
    """
    webhook, secret = await _webhooks(request).create(
        body.url,
        checked_types(body.types),
        body.secret,
        enabled=body.enabled,
        seed=request.scope.get("atoll.seed"),
    )
    return JsonResponse({**webhook_out(webhook), "secret": secret}, 201)


@router.get("", responses={200: {"model": WebhookList}})
async def list_webhooks(request: Request) -> JsonResponse:
    """List webhooks, oldest first."""
    return JsonResponse({"items": [webhook_out(one) for one in await _webhooks(request).list()]})


@router.get("/{webhook_id}", responses={200: {"model": WebhookOut}})
async def get_webhook(request: Request, webhook_id: str) -> JsonResponse:
    """Get a webhook and the state of its deliveries."""
    webhook = await _webhooks(request).get(webhook_id)
    return JsonResponse(webhook_out(webhook))


@router.patch("/{webhook_id}", responses={200: {"model": WebhookOut}})
async def change_webhook(request: Request, webhook_id: str, body: ChangeWebhook) -> JsonResponse:
    """Change a webhook. Deliveries that wait for a retry are tried at once."""
    changed = await _webhooks(request).change(
        webhook_id,
        url=body.url,
        types=None if body.types is None else checked_types(body.types),
        secret=body.secret,
        enabled=body.enabled,
    )
    return JsonResponse(webhook_out(changed))


@router.delete("/{webhook_id}", status_code=204)
async def delete_webhook(request: Request, webhook_id: str) -> Response:
    """Delete a webhook."""
    await _webhooks(request).remove(webhook_id)
    return Response(status_code=204)


@router.post("/{webhook_id}/test", responses={200: {"model": TriedOut}})
async def test_webhook(request: Request, webhook_id: str) -> JsonResponse:
    """Post a `webhook.test` event now, once, and return the outcome."""
    tried = await _webhooks(request).test(webhook_id)
    return JsonResponse(
        {"delivered": tried.error is None, "status": tried.status, "error": tried.error}
    )
