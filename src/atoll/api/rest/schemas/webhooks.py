"""Webhooks: URLs that events are posted to."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from atoll.api.rest.schemas.base import PatchBody, RequestBody, ResponseBody, Schema, encoder_of
from atoll.model.webhook import Deliveries, Webhook


class WebhookFields(Schema, of=Webhook):
    url: str = Field(examples=["https://example.com/atoll"])
    types: list[str] = Field(
        [],
        description="Types of events to deliver; all if empty.",
        examples=[["session.*", "execution.failed"]],
    )
    enabled: bool = True


class CreateWebhook(WebhookFields, RequestBody):
    secret: str | None = Field(
        None,
        description="`whsec_` followed by 24 to 64 bytes as base64. If omitted, one is generated "
        "and returned.",
        repr=False,
    )


class ChangeWebhook(WebhookFields, PatchBody):
    """Only the fields that are given are changed."""

    secret: str | None = Field(None, repr=False)


class DeliveriesOut(ResponseBody, of=Deliveries):
    failures: int = Field(description="Failed attempts to deliver the next event.")
    gave_up: int = Field(description="Events that were dropped after too many failed attempts.")
    missed: int = Field(description="Events that had expired before they could be delivered.")
    last_status: int | None = Field(description="Status code of the last response.")
    last_error: str | None = Field(description="Why the last attempt failed.")
    last_at: datetime | None
    retry_at: datetime | None = Field(description="When the next attempt is made.")


class WebhookOut(WebhookFields, ResponseBody, of=Webhook):
    id: str
    created_at: datetime
    delivered: int = Field(description="Number of the last delivered event.")
    deliveries: DeliveriesOut


webhook_out = encoder_of(WebhookOut)


class NewWebhook(WebhookOut):
    secret: str | None = Field(
        description="The generated secret; null if the request had one. It is not shown again."
    )


class WebhookList(ResponseBody):
    items: list[WebhookOut]


class TriedOut(ResponseBody):
    delivered: bool
    status: int | None = Field(description="Status code of the response.")
    error: str | None
