"""`atoll context …`."""

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import output
from atoll.cli.option_parsing import environment
from atoll.cli.options import ApiKey, Env, Json, SessionId, Timeout, Url, connect

app = typer.Typer(
    help="Contexts: interpreters that keep their state between executions.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

ContextId = Annotated[str, typer.Argument(metavar="CONTEXT", help="Context id.")]
_MAX_LISTED = 1000


@app.command()
def create(
    session_id: SessionId,
    language: Annotated[
        str, typer.Option("--language", "-l", help="Language; only python.")
    ] = "python",
    cwd: Annotated[str | None, typer.Option(help="Working directory. Default: /workspace.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Create a context and print its id."""
    with connect(url, api_key) as atoll:
        info = atoll.sessions.get(session_id).context(language, cwd=cwd).info
    output.as_json(info) if json else output.line(info.id)


@app.command("list")
def list_(
    session_id: SessionId, url: Url = None, api_key: ApiKey = None, json: Json = False
) -> None:
    """List the contexts of a session."""
    with connect(url, api_key) as atoll:
        found = atoll.sessions.get(session_id).contexts()
        infos = [context.info for context in islice(found, _MAX_LISTED)]
    if json:
        output.as_json(infos)
        return
    output.table(
        ("CONTEXT", "LANGUAGE", "STATE", "RUNS", "CWD", "AGE"),
        [
            (
                info.id,
                info.language,
                info.state,
                info.execution_count,
                info.cwd,
                output.age(info.created_at),
            )
            for info in infos
        ],
    )


@app.command()
def run(
    session_id: SessionId,
    context_id: ContextId,
    code: Annotated[
        str | None, typer.Option("--code", "-c", help="Code to run. Default: stdin.")
    ] = None,
    timeout: Timeout = None,
    env: Env = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write displayed results to files there: 1.png, 2.html, …"
        ),
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Run code in a context and exit with its exit code."""
    from atoll.cli.execution_output import show as show_live

    source = typer.get_text_stream("stdin").read() if code is None else code
    variables = environment(env)
    with connect(url, api_key) as atoll:
        context = atoll.sessions.get(session_id).get_context(context_id)
        execution = context.submit(source, timeout=timeout, env=variables)
        status = show_live(execution, json=json)
        shown = execution.result().results if save is not None else ()
    if save is not None and shown:
        save.mkdir(parents=True, exist_ok=True)
        for number, display in enumerate(shown, 1):
            output.note(f"saved {display.save(save / str(number))}")
    raise typer.Exit(status)


@app.command()
def restart(
    session_id: SessionId,
    context_id: ContextId,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Restart a context with an empty state. Cancels its running code."""
    with connect(url, api_key) as atoll:
        info = atoll.sessions.get(session_id).get_context(context_id).restart()
    output.as_json(info) if json else output.line(info.id)


@app.command()
def interrupt(
    session_id: SessionId,
    context_id: ContextId,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Interrupt the running code of a context, like Ctrl-C."""
    with connect(url, api_key) as atoll:
        info = atoll.sessions.get(session_id).get_context(context_id).interrupt()
    output.as_json(info) if json else output.line(info.id)


@app.command()
def delete(
    session_id: SessionId, context_id: ContextId, url: Url = None, api_key: ApiKey = None
) -> None:
    """Delete a context. Cancels its running code."""
    with connect(url, api_key) as atoll:
        atoll.sessions.get(session_id).get_context(context_id).delete()
    output.line(context_id)
