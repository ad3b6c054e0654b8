"""`atoll node …`."""

from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import output
from atoll.cli.options import ApiKey, Json, Url, connect

if TYPE_CHECKING:
    from atoll.sdk.values import NodeInfo

app = typer.Typer(
    help="Nodes: machines and Docker engines that host instances.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


NodeId = Annotated[str, typer.Argument(metavar="NODE", help="Node id.")]


@app.command("list")
def list_(url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """List nodes."""
    with connect(url, api_key) as atoll:
        nodes = list(atoll.nodes.list())
    if json:
        output.as_json(nodes)
        return
    output.table(
        ("NODE", "TYPE", "STATUS", "SESSIONS", "CPU", "MEMORY", "LABELS"),
        [
            (
                node.id,
                node.type,
                _state(node),
                node.session_count,
                _share(node.cpu_usage),
                _share(node.mem_usage),
                ", ".join(f"{name}={value}" for name, value in sorted(node.labels.items())),
            )
            for node in nodes
        ],
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _state(node: "NodeInfo") -> str:
    if node.drain is not None:
        return f"{node.status}, {_progress(node)}"
    return f"{node.status}, cordoned" if node.cordoned else node.status


def _progress(node: "NodeInfo") -> str:
    drain = node.drain
    if drain is None:
        return "not drained"
    if drain.left == 0:
        return "drained"
    why = "" if drain.message is None else f" ({drain.message})"
    return f"draining: {drain.left} of {drain.total} sessions left{why}"


@app.command()
def show(node_id: NodeId, url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Show a node: its load, its isolation and what it lacks."""
    with connect(url, api_key) as atoll:
        node = atoll.nodes.get(node_id)
    output.as_json(node) if json else output.details(node)


@app.command()
def cordon(node_id: NodeId, url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Place no new sessions on a node. Existing sessions stay."""
    with connect(url, api_key) as atoll:
        node = atoll.nodes.cordon(node_id)
    output.as_json(node) if json else output.line(_state(node))


@app.command()
def uncordon(node_id: NodeId, url: Url = None, api_key: ApiKey = None, json: Json = False) -> None:
    """Allow new sessions on a node again. Also ends a drain."""
    with connect(url, api_key) as atoll:
        node = atoll.nodes.uncordon(node_id)
    output.as_json(node) if json else output.line(_state(node))


@app.command()
def drain(
    node_id: NodeId,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until all sessions have left.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Maximum seconds to wait. The drain continues after it.")
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Move the sessions of a node, with their files, to other nodes."""
    with connect(url, api_key) as atoll:
        node = atoll.nodes.drain(node_id)
        if wait:
            try:
                for node in atoll.nodes.follow_drain(node_id, timeout=timeout):
                    output.note(_progress(node))
            except TimeoutError as error:
                output.error(str(error), "drain_timeout")
                raise typer.Exit(1) from None
    output.as_json(node) if json else output.line(_progress(node))
    if wait and node.drain is None:
        raise typer.Exit(1)  # The node was uncordoned meanwhile.


@app.command("rm")
def rm(
    node_id: Annotated[list[str], typer.Argument(metavar="NODE...", help="Node ids.")],
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Remove the records of lost or drained nodes without sessions."""
    with connect(url, api_key) as atoll:
        for one in node_id:
            atoll.nodes.delete(one)
    output.removed(node_id, json=json)
