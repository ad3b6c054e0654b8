"""`atoll webhook …`."""

from typing import Annotated

import typer

from atoll.cli import output
from atoll.cli.events import Types, split
from atoll.cli.options import ApiKey, Json, Url, connect

app = typer.Typer(
    help="Addresses that are told of events.", no_args_is_help=True, rich_markup_mode=None
)

WebhookId = Annotated[str, typer.Argument(metavar="WEBHOOK")]


@app.command()
def create(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Where events are sent.")],
    types: Types = None,
    secret: Annotated[
        str | None,
        typer.Option(
            help="whsec_ and 24 to 64 bytes as base64; else one is made.",
            envvar="ATOLL_WEBHOOK_SECRET",
        ),
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Have an address told of events; print its id, and the secret if it was made."""
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
    """Show one, and how its deliveries go."""
    with connect(url, api_key) as atoll:
        found = atoll.webhooks.get(webhook_id)
    output.as_json(found) if json else output.details(found)


@app.command()
def change(
    webhook_id: WebhookId,
    address: Annotated[str | None, typer.Option("--address", help="Another address.")] = None,
    types: Types = None,
    enabled: Annotated[
        bool | None, typer.Option("--enable/--disable", help="Whether it is told of events.")
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Change one; what waits to be tried again is tried at once."""
    with connect(url, api_key) as atoll:
        found = atoll.webhooks.change(
            webhook_id, url=address, types=None if types is None else split(types), enabled=enabled
        )
    output.as_json(found) if json else output.line(found.id)


@app.command()
def rm(
    webhook_id: Annotated[list[str], typer.Argument(metavar="WEBHOOK...")],
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
    """Have an event `webhook.test` sent to one now; exit 1 if it was not taken."""
    with connect(url, api_key) as atoll:
        tried = atoll.webhooks.test(webhook_id)
    if json:
        output.as_json(tried)
    else:
        output.line(f"answered {tried.status}" if tried.delivered else f"failed: {tried.error}")
    if not tried.delivered:
        raise typer.Exit(1)
