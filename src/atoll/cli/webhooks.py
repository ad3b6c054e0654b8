"""`atoll webhook …`."""

from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import exit_codes, output
from atoll.cli.events import Types, split
from atoll.cli.options import Json, command_group
from atoll.cli.remote import connected, remote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.sdk.sync import Atoll
    from atoll.sdk.values import WebhookInfo

app = command_group("Webhooks: URLs that receive events.")

WebhookId = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Webhook id.")]


def _print_created(webhook: "WebhookInfo") -> None:
    output.line(webhook.id)
    if webhook.secret is not None:
        output.line(webhook.secret)


@app.command()
@remote(show=_print_created)
def create(
    atoll: "Atoll",
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="URL that receives events.")],
    types: Types = None,
    secret: Annotated[
        str | None,
        typer.Option(
            help="whsec_ and 24 to 64 bytes as base64. Default: generated.",
            envvar="ATOLL_WEBHOOK_SECRET",
        ),
    ] = None,
) -> "WebhookInfo":
    """Create a webhook and print its id, and its secret if it was generated."""
    return atoll.webhooks.create(address, types=split(types), secret=secret)


@app.command("list")
@remote(
    table={
        "WEBHOOK": "id",
        "URL": "url",
        "TYPES": lambda one: ",".join(one.types) or "*",
        "ENABLED": lambda one: "yes" if one.enabled else "no",
        "DELIVERED": "delivered",
        "FAILURES": "deliveries.failures",
        "GAVE UP": lambda one: one.deliveries.gave_up + one.deliveries.missed,
        "LAST": lambda one: one.deliveries.last_error or one.deliveries.last_status,
    }
)
def list_(atoll: "Atoll") -> "Iterator[WebhookInfo]":
    """List webhooks, oldest first."""
    return atoll.webhooks.list()


@app.command()
@remote()
def show(atoll: "Atoll", webhook_id: WebhookId) -> "WebhookInfo":
    """Show a webhook and the state of its deliveries."""
    return atoll.webhooks.get(webhook_id)


@app.command()
@remote(line="id")
def change(
    atoll: "Atoll",
    webhook_id: WebhookId,
    address: Annotated[str | None, typer.Option("--address", help="New URL.")] = None,
    types: Types = None,
    enabled: Annotated[
        bool | None, typer.Option("--enable/--disable", help="Send events, or not.")
    ] = None,
) -> "WebhookInfo":
    """Change a webhook. Pending retries are sent at once."""
    return atoll.webhooks.change(
        webhook_id, url=address, types=None if types is None else split(types), enabled=enabled
    )


@app.command()
@remote(show=output.removed)
def rm(
    atoll: "Atoll",
    webhook_id: Annotated[list[str], typer.Argument(metavar="WEBHOOK...", help="Webhook ids.")],
) -> dict[str, list[str]]:
    """Remove webhooks."""
    for one in webhook_id:
        atoll.webhooks.delete(one)
    return {"removed": webhook_id}


@app.command("test")
@connected
def try_(atoll: "Atoll", webhook_id: WebhookId, json: Json = False) -> None:
    """Send a `webhook.test` event now. Exits with 1 if the receiver did not accept it."""
    tried = atoll.webhooks.test(webhook_id)
    if json:
        output.as_json(tried)
    else:
        output.line(f"answered {tried.status}" if tried.delivered else f"failed: {tried.error}")
    if not tried.delivered:
        raise typer.Exit(exit_codes.FAILED)
