"""`atoll invocation …`."""

from itertools import islice
from typing import Annotated

import typer

from atoll.cli import output
from atoll.cli.completion import session_ids
from atoll.cli.option_parsing import environment, pairs
from atoll.cli.options import (
    ApiKey,
    Env,
    Json,
    Limit,
    SessionId,
    Status,
    Timeout,
    Url,
    connect,
)

app = typer.Typer(
    help="Function calls. Their ids stay the same when they are retried.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

InvocationId = Annotated[str, typer.Argument(metavar="INVOCATION", help="Invocation id.")]


@app.command()
def invoke(
    session_id: SessionId,
    function: Annotated[
        str | None,
        typer.Argument(
            metavar="[FUNCTION]", help="module:name in the workspace, or a function in --code."
        ),
    ] = None,
    code: Annotated[
        str | None, typer.Option("--code", "-c", help="Code that defines the function.")
    ] = None,
    input: Annotated[
        str | None, typer.Option("--input", "-i", metavar="JSON", help="Argument of the function.")
    ] = None,
    timeout: Timeout = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            "--metadata", "-m", metavar="NAME=VALUE", help="Stored with the invocation. Repeatable."
        ),
    ] = None,
    env: Env = None,
    invocation_id: Annotated[
        str | None,
        typer.Option(
            "--invocation-id", help="Id of your choice. Repeating it does not run anything twice."
        ),
    ] = None,
    execution_id: Annotated[
        str | None,
        typer.Option(
            "--execution-id", help="Id of the execution. A new one retries a failed invocation."
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow/--no-follow", help="Wait for the end, or print the id and return."),
    ] = True,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """
    Call a function in a session and exit with its exit code.

    Output is shown as it arrives, and the return value follows on stdout as JSON. Ctrl-C cancels
    the call.
    """
    from atoll.cli.execution_output import show as show_live
    from atoll.cli.program_input import read_json

    if function is None and code is None:
        raise typer.BadParameter("give a function, or --code.", param_hint="FUNCTION")
    argument, variables = read_json(input, "--input"), environment(env)
    with connect(url, api_key) as atoll:
        invocation = atoll.sessions.get(session_id).invoke(
            function,
            code=code,
            input=argument,
            timeout=timeout,
            metadata=pairs(metadata, "--metadata"),
            env=variables,
            invocation_id=invocation_id,
            execution_id=execution_id,
            mode="async",
        )
        if not follow:
            output.as_json(invocation.info) if json else output.line(invocation.id)
            return
        name = function or "handler"
        status = show_live(invocation.execution, json=json, function=name)
    raise typer.Exit(status)


@app.command("list")
def list_(
    session_id: Annotated[
        str | None,
        typer.Option("--session", autocompletion=session_ids, help="Only those of this session."),
    ] = None,
    status: Status = None,
    limit: Limit = 100,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List invocations, including ended ones, newest first."""
    with connect(url, api_key) as atoll:
        found = atoll.invocations.list(session_id=session_id, status=status)
        infos = [invocation.info for invocation in islice(found, limit)]
    if json:
        output.as_json(infos)
        return
    output.table(
        ("INVOCATION", "STATUS", "FUNCTION", "SESSION", "EXECUTION", "AGE"),
        [
            (
                info.invocation_id,
                info.status,
                info.function_name,
                info.session_id,
                info.execution_id,
                output.age(info.created_at),
            )
            for info in infos
        ],
    )


@app.command()
def show(
    invocation_id: InvocationId, url: Url = None, api_key: ApiKey = None, json: Json = False
) -> None:
    """Show an invocation, with its result if it has ended."""
    with connect(url, api_key) as atoll:
        info = atoll.invocations.get(invocation_id).info
    output.as_json(info) if json else output.details(info)


@app.command()
def cancel(
    invocation_id: InvocationId,
    reason: Annotated[str | None, typer.Option(help="Stored with the invocation.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Cancel an invocation and print its status."""
    with connect(url, api_key) as atoll:
        info = atoll.invocations.get(invocation_id).cancel(reason)
    output.as_json(info) if json else output.line(info.status)
