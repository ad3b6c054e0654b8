"""`atoll node …`."""

from typing import Annotated

import typer

from atoll.cli import output
from atoll.cli.options import ApiKey, Json, Url, connect

app = typer.Typer(help="Places that host instances.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_(url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """List nodes."""
    with connect(url, api_key) as atoll:
        nodes = list(atoll.nodes.list())
    if json:
        output.as_json(nodes)
        return
    output.table(
        ("NODE", "TYPE", "STATUS", "SESSIONS", "CPU", "MEMORY"),
        [
            (
                node.id,
                node.type,
                node.status,
                node.session_count,
                f"{node.cpu_usage:.0%}",
                f"{node.mem_usage:.0%}",
            )
            for node in nodes
        ],
    )


@app.command()
def show(
    node_id: Annotated[str, typer.Argument(metavar="NODE", help="Its id.")],
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Show what a node can give, and how busy it is."""
    with connect(url, api_key) as atoll:
        health, metrics = atoll.nodes.health(node_id), atoll.nodes.metrics(node_id)
    if json:
        output.as_json({"health": health, "metrics": metrics})
    else:
        output.details(health)
        output.details(metrics)
