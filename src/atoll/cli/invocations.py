"""`atoll invocation …`."""

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import output
from atoll.cli.option_parsing import environment, pairs
from atoll.cli.options import (
    Env,
    Follow,
    Json,
    Limit,
    OfSession,
    SessionId,
    Status,
    Timeout,
    command_group,
)
from atoll.cli.remote import connected, remote

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.sdk.sync import Atoll
    from atoll.sdk.values import InvocationInfo

app = command_group("Function calls. Their ids stay the same when they are retried.")

InvocationId = Annotated[str, typer.Argument(metavar="INVOCATION", help="Invocation id.")]


@dataclass(kw_only=True)
class InvokeOptions:
    code: Annotated[
        str | None, typer.Option("--code", "-c", help="Code that defines the function.")
    ] = None
    input: Annotated[
        str | None, typer.Option("--input", "-i", metavar="JSON", help="Argument of the function.")
    ] = None
    timeout: Timeout = None
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--metadata", "-m", metavar="NAME=VALUE", help="Stored with the invocation. Repeatable."
        ),
    ] = None
    env: Env = None
    invocation_id: Annotated[
        str | None,
        typer.Option(
            "--invocation-id", help="Id of your choice. Repeating it does not run anything twice."
        ),
    ] = None
    execution_id: Annotated[
        str | None,
        typer.Option(
            "--execution-id", help="Id of the execution. A new one retries a failed invocation."
        ),
    ] = None
    follow: Follow = True


@app.command()
@connected
def invoke(
    atoll: "Atoll",
    session_id: SessionId,
    function: Annotated[
        str | None,
        typer.Argument(
            metavar="[FUNCTION]", help="module:name in the workspace, or a function in --code."
        ),
    ] = None,
    *,
    options: InvokeOptions,
    json: Json = False,
) -> None:
    """
    Call a function in a session and exit with its exit code.

    Output is shown as it arrives, and the return value follows on stdout as JSON. Ctrl-C cancels
    the call.
    """
    from atoll.cli.execution_output import show as show_live
    from atoll.cli.program_input import read_json

    if function is None and options.code is None:
        raise typer.BadParameter("give a function, or --code.", param_hint="FUNCTION")
    argument, variables = read_json(options.input, "--input"), environment(options.env)
    metadata = pairs(options.metadata, "--metadata")
    invocation = atoll.sessions.get(session_id).invoke(
        function,
        code=options.code,
        input=argument,
        timeout=options.timeout,
        metadata=metadata,
        env=variables,
        invocation_id=options.invocation_id,
        execution_id=options.execution_id,
        mode="async",
    )
    if not options.follow:
        output.as_json(invocation.info) if json else output.line(invocation.id)
        return
    name = function or "handler"
    raise typer.Exit(show_live(invocation.execution, json=json, function=name))


@app.command("list")
@remote(
    table={
        "INVOCATION": "invocation_id",
        "STATUS": "status",
        "FUNCTION": "function_name",
        "SESSION": "session_id",
        "EXECUTION": "execution_id",
        "AGE": "created_at",
    }
)
def list_(
    atoll: "Atoll",
    session_id: OfSession = None,
    status: Status = None,
    limit: Limit = 100,
) -> "Iterable[InvocationInfo]":
    """List invocations, including ended ones, newest first."""
    found = atoll.invocations.list(session_id=session_id, status=status)
    return (invocation.info for invocation in islice(found, limit))


@app.command()
@remote()
def show(atoll: "Atoll", invocation_id: InvocationId) -> "InvocationInfo":
    """Show an invocation, with its result if it has ended."""
    return atoll.invocations.get(invocation_id).info


@app.command()
@remote(line="status")
def cancel(
    atoll: "Atoll",
    invocation_id: InvocationId,
    reason: Annotated[str | None, typer.Option(help="Stored with the invocation.")] = None,
) -> "InvocationInfo":
    """Cancel an invocation and print its status."""
    return atoll.invocations.get(invocation_id).cancel(reason)
