"""`atoll webhook …`."""

from typing import Annotated

import typer

from atoll.cli import output
from atoll.cli.events import Types, split
from atoll.cli.options import ApiKey, Json, Url, connect

app = typer.Typer(
    help="Webhooks: URLs that receive events.", no_args_is_help=True, rich_markup_mode=None
)

WebhookId = Annotated[str, typer.Argument(metavar="WEBHOOK", help="Webhook id.")]


@app.command()
def create(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="URL that receives events.")],
    types: Types = None,
    secret: Annotated[
        str | None,
        typer.Option(
            help="whsec_ and 24 to 64 bytes as base64. Default: generated.",
            envvar="ATOLL_WEBHOOK_SECRET",
        ),
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Create a webhook and print its id, and its secret if it was generated."""
    with connect(url, api_key) as atoll:
        made = atoll.webhooks.create(address, types=split(types), secret=secret)
    if json:
        output.as_json(made)
        return
    output.line(made.id)
    if made.secret is not None:
        output.line(made.secret)


@app.command("list")
def list_(url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """List webhooks, oldest first."""
    with connect(url, api_key) as atoll:
        found = list(atoll.webhooks.list())
    if json:
        output.as_json(found)
        return
    output.table(
        ("WEBHOOK", "URL", "TYPES", "ENABLED", "DELIVERED", "FAILURES", "GAVE UP", "LAST"),
        [
            (
                one.id,
                one.url,
                ",".join(one.types) or "*",
                "yes" if one.enabled else "no",
                one.delivered,
                one.deliveries.failures,
                one.deliveries.gave_up + one.deliveries.missed,
                one.deliveries.last_error or one.deliveries.last_status,
            )
            for one in found
        ],
    )


@app.command()
def show(
    webhook_id: WebhookId, url: Url = None, api_key: ApiKey = None, json: Json = False
) -> None:
    """Show a webhook and the state of its deliveries."""
    with connect(url, api_key) as atoll:
        found = atoll.webhooks.get(webhook_id)
    output.as_json(found) if json else output.details(found)


@app.command()
def change(
    webhook_id: WebhookId,
    address: Annotated[str | None, typer.Option("--address", help="New URL.")] = None,
    types: Types = None,
    enabled: Annotated[
        bool | None, typer.Option("--enable/--disable", help="Send events, or not.")
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Change a webhook. Pending retries are sent at once."""
    with connect(url, api_key) as atoll:
        found = atoll.webhooks.change(
            webhook_id, url=address, types=None if types is None else split(types), enabled=enabled
        )
    output.as_json(found) if json else output.line(found.id)


@app.command()
def rm(
    webhook_id: Annotated[list[str], typer.Argument(metavar="WEBHOOK...", help="Webhook ids.")],
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Remove webhooks."""
    with connect(url, api_key) as atoll:
        for one in webhook_id:
            atoll.webhooks.delete(one)
    output.removed(webhook_id, json=json)


@app.command("test")
def try_(
    webhook_id: WebhookId, url: Url = None, api_key: ApiKey = None, json: Json = False
) -> None:
    """Send a `webhook.test` event now. Exits with 1 if the receiver did not accept it."""
    with connect(url, api_key) as atoll:
        tried = atoll.webhooks.test(webhook_id)
    if json:
        output.as_json(tried)
    else:
        output.line(f"answered {tried.status}" if tried.delivered else f"failed: {tried.error}")
    if not tried.delivered:
        raise typer.Exit(1)
