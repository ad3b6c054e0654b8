"""`atoll context …`."""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import output
from atoll.cli.option_parsing import environment
from atoll.cli.options import Cwd, Env, Json, SessionId, Timeout, command_group
from atoll.cli.remote import connected, remote

if TYPE_CHECKING:
    from collections.abc import Iterable

    from atoll.sdk.sync import Atoll
    from atoll.sdk.values import ContextInfo

app = command_group("Contexts: interpreters that keep their state between executions.")

ContextId = Annotated[str, typer.Argument(metavar="CONTEXT", help="Context id.")]
_MAX_LISTED = 1000


@app.command()
@remote(line="id")
def create(
    atoll: "Atoll",
    session_id: SessionId,
    language: Annotated[
        str, typer.Option("--language", "-l", help="Language; only python.")
    ] = "python",
    cwd: Cwd = None,
) -> "ContextInfo":
    """Create a context and print its id."""
    return atoll.sessions.get(session_id).context(language, cwd=cwd).info


@app.command("list")
@remote(
    table={
        "CONTEXT": "id",
        "LANGUAGE": "language",
        "STATE": "state",
        "RUNS": "execution_count",
        "CWD": "cwd",
        "AGE": "created_at",
    }
)
def list_(atoll: "Atoll", session_id: SessionId) -> "Iterable[ContextInfo]":
    """List the contexts of a session."""
    found = atoll.sessions.get(session_id).contexts()
    return (context.info for context in islice(found, _MAX_LISTED))


@dataclass(kw_only=True)
class RunOptions:
    code: Annotated[
        str | None, typer.Option("--code", "-c", help="Code to run. Default: stdin.")
    ] = None
    timeout: Timeout = None
    env: Env = None
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write displayed results to files there: 1.png, 2.html, …"
        ),
    ] = None


@app.command()
@connected
def run(
    atoll: "Atoll",
    session_id: SessionId,
    context_id: ContextId,
    options: RunOptions,
    json: Json = False,
) -> None:
    """Run code in a context and exit with its exit code."""
    from atoll.cli.execution_output import show as show_live

    code = typer.get_text_stream("stdin").read() if options.code is None else options.code
    variables = environment(options.env)
    context = atoll.sessions.get(session_id).get_context(context_id)
    execution = context.submit(code, timeout=options.timeout, env=variables)
    status = show_live(execution, json=json)
    shown = () if options.save is None else execution.result().results
    if options.save is not None and shown:
        options.save.mkdir(parents=True, exist_ok=True)
        for number, display in enumerate(shown, 1):
            output.note(f"saved {display.save(options.save / str(number))}")
    raise typer.Exit(status)


@app.command()
@remote(line="id")
def restart(atoll: "Atoll", session_id: SessionId, context_id: ContextId) -> "ContextInfo":
    """Restart a context with an empty state. Cancels its running code."""
    return atoll.sessions.get(session_id).get_context(context_id).restart()


@app.command()
@remote(line="id")
def interrupt(atoll: "Atoll", session_id: SessionId, context_id: ContextId) -> "ContextInfo":
    """Interrupt the running code of a context, like Ctrl-C."""
    return atoll.sessions.get(session_id).get_context(context_id).interrupt()


@app.command()
@connected
def delete(atoll: "Atoll", session_id: SessionId, context_id: ContextId) -> None:
    """Delete a context. Cancels its running code."""
    atoll.sessions.get(session_id).get_context(context_id).delete()
    output.line(context_id)
