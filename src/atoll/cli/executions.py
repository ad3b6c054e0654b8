"""`atoll execution …`."""

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import output
from atoll.cli.completion import execution_ids
from atoll.cli.options import Json, JsonLines, Limit, OfSession, command_group
from atoll.cli.options import Status as StatusFilter
from atoll.cli.remote import connected, remote

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.sdk.sync import Atoll
    from atoll.sdk.values import Event, ExecutionInfo, Status

app = command_group("Executions in sessions, running and ended.")

ExecutionId = Annotated[
    str, typer.Argument(metavar="EXECUTION", help="Execution id.", autocompletion=execution_ids)
]
ApprovalId = Annotated[str | None, typer.Option("--approval-id", help="Answer only this question.")]


@app.command("list")
@remote(
    table={
        "EXECUTION": "id",
        "STATUS": "status",
        "SESSION": "session_id",
        "ATTEMPT": lambda info: info.retry_count + 1,
        "EXIT": "exit_code",
        "CAUSE": "cause",
        "AGE": "created_at",
    }
)
def list_(
    atoll: "Atoll",
    session_id: OfSession = None,
    invocation_id: Annotated[
        str | None, typer.Option("--invocation", help="Only those of this invocation.")
    ] = None,
    status: StatusFilter = None,
    limit: Limit = 100,
) -> "Iterable[ExecutionInfo]":
    """List executions, including ended ones, newest first."""
    found = atoll.executions.list(session_id=session_id, invocation_id=invocation_id, status=status)
    return islice(found, limit)


@app.command()
@remote()
def show(atoll: "Atoll", execution_id: ExecutionId) -> "ExecutionInfo":
    """Show an execution with its output and pending approval."""
    return atoll.execution(execution_id).info()


@app.command()
@connected
def follow(atoll: "Atoll", execution_id: ExecutionId, json: Json = False) -> None:
    """
    Show the output of an execution until it ends, and exit with its exit code.

    Starts with its first output. Ctrl-C leaves the execution running.
    """
    from atoll.cli.execution_output import show as show_live

    raise typer.Exit(show_live(atoll.execution(execution_id), json=json, own=False))


@app.command()
@connected
def events(
    atoll: "Atoll",
    execution_id: ExecutionId,
    after: Annotated[int, typer.Option(min=0, help="Only events after this number.")] = 0,
    json: JsonLines = False,
) -> None:
    """Print the events of an execution until it ends. Ctrl-C leaves the execution running."""
    from json import dumps

    for event in atoll.execution(execution_id).events(after):
        content = _content(event)
        if json:
            line = {"id": event.sequence or None, "event": event.kind, **content}
            output.as_json(line, indent=None)
        else:
            words = dumps(content, default=output.plain, ensure_ascii=False) if content else ""
            output.line(f"{event.sequence or '-'} {event.kind} {words}".rstrip())


@app.command()
@remote(line="status")
def cancel(
    atoll: "Atoll",
    execution_id: ExecutionId,
    reason: Annotated[str | None, typer.Option(help="Stored with the execution.")] = None,
) -> "Status":
    """Cancel an execution and print its status."""
    return atoll.execution(execution_id).cancel(reason)


@app.command()
@remote(line="status")
def inject(
    atoll: "Atoll",
    execution_id: ExecutionId,
    message: Annotated[
        str | None, typer.Argument(help="Message that the code reads with messages().")
    ] = None,
    stdin: Annotated[
        bool, typer.Option("--stdin", help="Instead, pipe stdin to the program's stdin.")
    ] = False,
    eof: Annotated[bool, typer.Option("--eof", help="Then close the program's stdin.")] = False,
) -> "Status":
    """Send running code a message, or input on stdin."""
    import os
    import sys

    if (message is None) == (not (stdin or eof)):
        raise typer.BadParameter("give a message, or --stdin or --eof.", param_hint="MESSAGE")
    execution = atoll.execution(execution_id)
    if message is not None:
        return execution.send(message)
    while stdin and (piece := os.read(sys.stdin.fileno(), 65536)):
        execution.write(piece)
    return execution.write(b"", eof=eof)


@app.command()
@remote(line="status")
def approve(
    atoll: "Atoll",
    execution_id: ExecutionId,
    answer: Annotated[str | None, typer.Option(metavar="JSON", help="Answer for the code.")] = None,
    approval_id: ApprovalId = None,
) -> "Status":
    """Approve the question of an execution."""
    from atoll.cli.program_input import read_json

    given = read_json(answer, "--answer")
    return atoll.execution(execution_id).approve(given, approval_id=approval_id)


@app.command()
@remote(line="status")
def refuse(
    atoll: "Atoll",
    execution_id: ExecutionId,
    reason: Annotated[str | None, typer.Option(help="Reason for the code.")] = None,
    approval_id: ApprovalId = None,
) -> "Status":
    """Refuse the question of an execution."""
    return atoll.execution(execution_id).refuse(reason, approval_id=approval_id)


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
