"""`atoll node …` and `atoll pools`."""

from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import exit_codes, output
from atoll.cli.options import Json, command_group
from atoll.cli.remote import connected, remote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.sdk.sync import Atoll
    from atoll.sdk.values import NodeInfo, PoolInfo

app = command_group("Nodes: machines and Docker engines that host instances.")


NodeId = Annotated[str, typer.Argument(metavar="NODE", help="Node id.")]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _state(node: "NodeInfo") -> str:
    if node.drain is not None:
        return f"{node.status}, {_progress(node)}"
    return f"{node.status}, cordoned" if node.cordoned else node.status


def _print_state(node: "NodeInfo") -> None:
    output.line(_state(node))


def _progress(node: "NodeInfo") -> str:
    drain = node.drain
    if drain is None:
        return "not drained"
    if drain.left == 0:
        return "drained"
    why = "" if drain.message is None else f" ({drain.message})"
    return f"draining: {drain.left} of {drain.total} sessions left{why}"


@app.command("list")
@remote(
    table={
        "NODE": "id",
        "TYPE": "type",
        "STATUS": _state,
        "SESSIONS": "session_count",
        "CPU": lambda node: _share(node.cpu_usage),
        "MEMORY": lambda node: _share(node.mem_usage),
        "LABELS": lambda node: ", ".join(
            f"{name}={value}" for name, value in sorted(node.labels.items())
        ),
    }
)
def list_(atoll: "Atoll") -> "Iterator[NodeInfo]":
    """List nodes."""
    return atoll.nodes.list()


@app.command()
@remote()
def show(atoll: "Atoll", node_id: NodeId) -> "NodeInfo":
    """Show a node: its load, its isolation and what it lacks."""
    return atoll.nodes.get(node_id)


@app.command()
@remote(show=_print_state)
def cordon(atoll: "Atoll", node_id: NodeId) -> "NodeInfo":
    """Place no new sessions on a node. Existing sessions stay."""
    return atoll.nodes.cordon(node_id)


@app.command()
@remote(show=_print_state)
def uncordon(atoll: "Atoll", node_id: NodeId) -> "NodeInfo":
    """Allow new sessions on a node again. Also ends a drain."""
    return atoll.nodes.uncordon(node_id)


@app.command()
@connected
def drain(
    atoll: "Atoll",
    node_id: NodeId,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until all sessions have left.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(help="Maximum seconds to wait. The drain continues after it.")
    ] = None,
    json: Json = False,
) -> None:
    """Move the sessions of a node, with their files, to other nodes."""
    node = atoll.nodes.drain(node_id)
    if wait:
        try:
            for node in atoll.nodes.follow_drain(node_id, timeout=timeout):
                output.note(_progress(node))
        except TimeoutError as error:
            output.error(str(error), "drain_timeout")
            raise typer.Exit(exit_codes.FAILED) from None
    output.as_json(node) if json else output.line(_progress(node))
    if wait and node.drain is None:
        raise typer.Exit(exit_codes.FAILED)  # The node was uncordoned meanwhile.


@app.command("rm")
@remote(show=output.removed)
def rm(
    atoll: "Atoll",
    node_id: Annotated[list[str], typer.Argument(metavar="NODE...", help="Node ids.")],
) -> dict[str, list[str]]:
    """Remove the records of lost or drained nodes without sessions."""
    for one in node_id:
        atoll.nodes.delete(one)
    return {"removed": node_id}


def _start_time(pool: "PoolInfo") -> str:
    return "-" if pool.start_seconds is None else f"{pool.start_seconds * 1000:.0f} ms"


@remote(
    table={
        "TEMPLATE": "template_id",
        "READY": "ready",
        "STARTING": "starting",
        "TARGET": "target",
        "BOUNDS": lambda pool: f"{pool.minimum}-{pool.maximum}",
        "RATE": lambda pool: f"{pool.rate_per_minute:.1f}/min",
        "START": _start_time,
        "HITS": lambda pool: f"{pool.hits}/{pool.hits + pool.misses}",
        "LIMIT": lambda pool: pool.message or pool.limited_by,
    }
)
def pools(atoll: "Atoll") -> "Iterator[PoolInfo]":
    """List the warm pools of the server."""
    return atoll.pools.list()
