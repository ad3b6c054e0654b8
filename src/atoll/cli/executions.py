"""`atoll execution …`."""

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import output
from atoll.cli.completion import execution_ids, session_ids
from atoll.cli.options import ApiKey, Json, JsonLines, Limit, Url, connect
from atoll.cli.options import Status as StatusFilter

if TYPE_CHECKING:
    from atoll.sdk.values import Event, Status

app = typer.Typer(
    help="Executions in sessions, running and ended.", no_args_is_help=True, rich_markup_mode=None
)

ExecutionId = Annotated[
    str, typer.Argument(metavar="EXECUTION", help="Execution id.", autocompletion=execution_ids)
]
ApprovalId = Annotated[str | None, typer.Option("--approval-id", help="Answer only this question.")]


@app.command("list")
def list_(
    session_id: Annotated[
        str | None,
        typer.Option("--session", autocompletion=session_ids, help="Only those of this session."),
    ] = None,
    invocation_id: Annotated[
        str | None, typer.Option("--invocation", help="Only those of this invocation.")
    ] = None,
    status: StatusFilter = None,
    limit: Limit = 100,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List executions, including ended ones, newest first."""
    with connect(url, api_key) as atoll:
        found = atoll.executions.list(
            session_id=session_id, invocation_id=invocation_id, status=status
        )
        infos = list(islice(found, limit))
    if json:
        output.as_json(infos)
        return
    output.table(
        ("EXECUTION", "STATUS", "SESSION", "ATTEMPT", "EXIT", "CAUSE", "AGE"),
        [
            (
                info.id,
                info.status,
                info.session_id,
                info.retry_count + 1,
                info.exit_code,
                info.cause,
                output.age(info.created_at),
            )
            for info in infos
        ],
    )


@app.command()
def show(
    execution_id: ExecutionId, url: Url = None, api_key: ApiKey = None, json: Json = False
) -> None:
    """Show an execution with its output and pending approval."""
    with connect(url, api_key) as atoll:
        info = atoll.execution(execution_id).info()
    output.as_json(info) if json else output.details(info)


@app.command()
def follow(
    execution_id: ExecutionId, url: Url = None, api_key: ApiKey = None, json: Json = False
) -> None:
    """
    Show the output of an execution until it ends, and exit with its exit code.

    Starts with its first output. Ctrl-C leaves the execution running.
    """
    from atoll.cli.execution_output import show as show_live

    with connect(url, api_key) as atoll:
        status = show_live(atoll.execution(execution_id), json=json, own=False)
    raise typer.Exit(status)


@app.command()
def events(
    execution_id: ExecutionId,
    after: Annotated[int, typer.Option(min=0, help="Only events after this number.")] = 0,
    url: Url = None,
    api_key: ApiKey = None,
    json: JsonLines = False,
) -> None:
    """Print the events of an execution until it ends. Ctrl-C leaves the execution running."""
    from json import dumps

    with connect(url, api_key) as atoll:
        for event in atoll.execution(execution_id).events(after):
            content = _content(event)
            if json:
                line = {"id": event.sequence or None, "event": event.kind, **content}
                output.as_json(line, indent=None)
            else:
                words = dumps(content, default=output.plain, ensure_ascii=False) if content else ""
                output.line(f"{event.sequence or '-'} {event.kind} {words}".rstrip())


@app.command()
def cancel(
    execution_id: ExecutionId,
    reason: Annotated[str | None, typer.Option(help="Stored with the execution.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Cancel an execution and print its status."""
    with connect(url, api_key) as atoll:
        _print_status(atoll.execution(execution_id).cancel(reason), json=json)


@app.command()
def inject(
    execution_id: ExecutionId,
    message: Annotated[
        str | None, typer.Argument(help="Message that the code reads with messages().")
    ] = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Instead, pipe stdin to the program's stdin.")
    ] = False,
    eof: Annotated[bool, typer.Option("--eof", help="Then close the program's stdin.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Send running code a message, or input on stdin."""
    import os
    import sys

    if (message is None) == (not (stdin or eof)):
        raise typer.BadParameter("give a message, or --stdin or --eof.", param_hint="MESSAGE")
    with connect(url, api_key) as atoll:
        execution = atoll.execution(execution_id)
        if message is not None:
            status = execution.send(message)
        else:
            while stdin and (piece := os.read(sys.stdin.fileno(), 65536)):
                execution.write(piece)
            status = execution.write(b"", eof=eof)
    _print_status(status, json=json)


@app.command()
def approve(
    execution_id: ExecutionId,
    answer: Annotated[str | None, typer.Option(metavar="JSON", help="Answer for the code.")] = None,
    approval_id: ApprovalId = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Approve the question of an execution."""
    from atoll.cli.program_input import read_json

    given = read_json(answer, "--answer")
    with connect(url, api_key) as atoll:
        _print_status(
            atoll.execution(execution_id).approve(given, approval_id=approval_id), json=json
        )


@app.command()
def refuse(
    execution_id: ExecutionId,
    reason: Annotated[str | None, typer.Option(help="Reason for the code.")] = None,
    approval_id: ApprovalId = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Refuse the question of an execution."""
    with connect(url, api_key) as atoll:
        _print_status(
            atoll.execution(execution_id).refuse(reason, approval_id=approval_id), json=json
        )


def _print_status(status: "Status", *, json: bool) -> None:
    output.as_json(status) if json else output.line(status.status)


def _content(event: "Event") -> dict[str, object]:
    """The content of an event as in the API."""
    if event.kind in ("stdout", "stderr"):
        return {"text": event.text}
    value = event.result or event.approval or event.retry or event.display
    if value is not None:
        content: dict[str, object] = output.plain(value)
        return content
    found = {"ahead": event.ahead, "attempt": event.attempt}
    return {name: number for name, number in found.items() if number is not None}
