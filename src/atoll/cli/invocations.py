"""`atoll invocation …`."""

from itertools import islice
from typing import Annotated

import typer

from atoll.cli import output
from atoll.cli.completion import session_ids
from atoll.cli.options import ApiKey, Env, Json, Url, connect, environment

app = typer.Typer(
    help="Requests to run something; their ids stay however often they are tried.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

InvocationId = Annotated[str, typer.Argument(metavar="INVOCATION", help="Its id.")]


@app.command()
def invoke(
    session_id: Annotated[
        str, typer.Argument(metavar="SESSION", help="Its id.", autocompletion=session_ids)
    ],
    function: Annotated[
        str | None,
        typer.Argument(metavar="[FUNCTION]", help="module:name in the workspace, or in --code."),
    ] = None,
    code: Annotated[str | None, typer.Option("--code", "-c", help="What defines it.")] = None,
    input: Annotated[
        str | None, typer.Option("--input", "-i", metavar="JSON", help="Given to the function.")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", "-t", help="Seconds that it may run.")
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option("--metadata", "-m", metavar="NAME=VALUE", help="Kept; may be repeated."),
    ] = None,
    env: Env = None,
    invocation_id: Annotated[
        str | None,
        typer.Option("--invocation-id", help="An id of your own: given again, it is the same."),
    ] = None,
    execution_id: Annotated[
        str | None,
        typer.Option("--execution-id", help="The same; a new one tries again what has failed."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Or only print the invocation's id.")
    ] = True,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """
    Call a function and end with its exit code.

    Its output is passed on as it comes, and what it returns follows on stdout, as JSON. Ctrl-C
    cancels it.
    """
    from atoll.cli.execution_output import show as show_live
    from atoll.cli.program_input import read_json

    if function is None and code is None:
        raise typer.BadParameter("name a function, or give --code.", param_hint="FUNCTION")
    given, variables = read_json(input, "--input"), environment(env)
    with connect(url, api_key) as atoll:
        invocation = atoll.sessions.get(session_id).invoke(
            function,
            code=code,
            input=given,
            timeout=timeout,
            metadata=_pairs(metadata),
            env=variables,
            invocation_id=invocation_id,
            execution_id=execution_id,
            mode="async",
        )
        if not follow:
            output.as_json(invocation.info) if json else output.line(invocation.id)
            return
        invoke_callback = function or "handler"
        status = show_live(invocation.execution, json=json, function=invoke_callback)
    raise typer.Exit(status)


@app.command("list")
def list_(
    session_id: Annotated[
        str | None, typer.Option("--session", autocompletion=session_ids, help="Of this session.")
    ] = None,
    status: Annotated[str | None, typer.Option(help="Only those in this status.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, the newest.")] = 100,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List invocations, newest first, ended ones included."""
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
    """Show one invocation, with its result when it has ended."""
    with connect(url, api_key) as atoll:
        info = atoll.invocations.get(invocation_id).info
    output.as_json(info) if json else output.details(info)


@app.command()
def cancel(
    invocation_id: InvocationId,
    reason: Annotated[str | None, typer.Option(help="Kept with it.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """End it, and print how it ended."""
    with connect(url, api_key) as atoll:
        info = atoll.invocations.get(invocation_id).cancel(reason)
    output.as_json(info) if json else output.line(info.status)


def _pairs(words: list[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{word!r} is not NAME=VALUE.", param_hint="--metadata")
        found[name] = value
    return found
