"""`atoll session …`."""

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from atoll.cli import files, output, session_lifecycle
from atoll.cli.completion import session_ids, template_ids
from atoll.cli.option_parsing import environment
from atoll.cli.options import (
    ApiKey,
    Json,
    Limit,
    ProgramOptions,
    SessionId,
    Status,
    Template,
    Url,
    connect,
    expand_options,
)
from atoll.cli.session_options import (
    AllowVersionConflicts,
    InstallTimeout,
    NewSessionOptions,
    create_options,
)
from atoll.cli.shell import shell

if TYPE_CHECKING:
    from atoll.sdk.values import SessionInfo

app = typer.Typer(help="Sandboxes of a server.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
@expand_options
def create(
    template: Template = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
    **options: Unpack[NewSessionOptions],
) -> None:
    """Create a session and print its id."""
    given = create_options(options)
    with connect(url, api_key) as atoll:
        session = atoll.sessions.create(template, **given)
    output.as_json(session.info) if json else output.line(session.id)


@app.command("list")
def list_(
    status: Status = None,
    template: Annotated[
        str | None, typer.Option(autocompletion=template_ids, help="Only those of this template.")
    ] = None,
    limit: Limit = 100,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List sessions, including ended ones, newest first."""
    with connect(url, api_key) as atoll:
        found = atoll.sessions.list(status=status, template=template)
        infos = [session.info for session in islice(found, limit)]
    if json:
        output.as_json(infos)
        return
    output.table(
        ("SESSION", "STATUS", "TEMPLATE", "NODE", "CPU", "MEMORY", "AGE", "CAUSE"),
        [
            (
                info.id,
                info.status,
                info.template_id,
                info.runtime_node,
                info.resources.cpu,
                info.resources.memory,
                output.age(info.created_at),
                info.cause,
            )
            for info in infos
        ],
    )


@app.command()
def show(
    session_id: SessionId, url: Url = None, api_key: ApiKey = None, json: Json = False
) -> None:
    """Show a session: its requested and current state, and its next automatic change."""
    with connect(url, api_key) as atoll:
        info = atoll.sessions.get(session_id).info
    if json:
        output.as_json(info)
    else:
        output.details(session_lifecycle.described(info))


@app.command()
def ps(
    session_id: SessionId,
    end: Annotated[bool, typer.Option("--end", help="Kill them with their children.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List background processes that executions of a session left running."""
    with connect(url, api_key) as atoll:
        session = atoll.sessions.get(session_id)
        found = session.end_processes() if end else session.processes()
    if json:
        output.as_json(found)
    else:
        rows = [(process.pid, process.name, process.execution_id) for process in found]
        output.table(("PID", "NAME", "EXECUTION"), rows)


@app.command()
def install(
    session_id: SessionId,
    dependency: Annotated[
        list[str],
        typer.Argument(metavar="PACKAGE...", help='Packages, like "requests" or "pandas>=2".'),
    ],
    install_timeout: InstallTimeout = None,
    allow_version_conflicts: AllowVersionConflicts = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Install Python packages in a session. Later executions can import them."""
    with connect(url, api_key) as atoll:
        packages = atoll.sessions.get(session_id).install(
            dependency,
            timeout=install_timeout,
            allow_version_conflicts=bool(allow_version_conflicts),
        )
    if json:
        output.as_json(packages)
        return
    for line in packages.installed:
        output.line(line)


@app.command("exec")
@expand_options
def exec_(
    session_id: SessionId,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND [ARGS]...]", help="Command; with --code, arguments of the code."
        ),
    ] = None,
    code: Annotated[str | None, typer.Option("--code", "-c", help="Code to run.")] = None,
    language: Annotated[
        str,
        typer.Option("--language", "-l", help="Language of the code: python, javascript, shell."),
    ] = "python",
    cwd: Annotated[str | None, typer.Option(help="Working directory. Default: /workspace.")] = None,
    execution_id: Annotated[
        str | None,
        typer.Option(
            "--execution-id", help="Id of your choice. Repeating it does not run anything twice."
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow/--no-follow", help="Wait for the end, or print the id and return."),
    ] = True,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
    **options: Unpack[ProgramOptions],
) -> None:
    """
    Run a command, or code, in a session and exit with its exit code.

    Output is shown as it arrives. Ctrl-C cancels the execution.
    """
    from atoll.cli.execution_output import show as show_live
    from atoll.cli.program_input import read_event, read_stdin

    if code is None and not words:
        raise typer.BadParameter("give a command after --, or --code.", param_hint="COMMAND")
    event, variables = read_event(options["event"]), environment(options["env"])
    stdin = read_stdin(options["stdin"])
    with connect(url, api_key) as atoll:
        execution = atoll.sessions.get(session_id).submit(
            code,
            language=language,
            command=words if code is None else None,
            args=words or [] if code is not None else (),
            event=event,
            timeout=options["timeout"],
            stdin=stdin,
            env=variables,
            cwd=cwd,
            execution_id=execution_id,
        )
        if not follow:
            output.as_json(execution.status()) if json else output.line(execution.id)
            return
        status = show_live(execution, json=json)
    raise typer.Exit(status)


@app.command()
def rm(
    which: Annotated[
        list[str],
        typer.Argument(
            metavar="SESSION[:PATH]...",
            help="Session to end, or file to remove.",
            autocompletion=session_ids,
        ),
    ],
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Also remove directories with their contents.")
    ] = False,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """
    End sessions, or remove files from them. Records and results of ended sessions stay readable.
    """
    targets = [(*files.split_path(one), ":" in one) for one in which]
    if any(named and not path for _, path, named in targets):
        raise typer.BadParameter("expected a path after the colon.", param_hint="SESSION:PATH")
    infos: list[SessionInfo] = []
    with connect(url, api_key) as atoll:
        for session_id, path, named in targets:
            if named:
                atoll.sessions.get(session_id).files.remove(path, recursive=recursive)
            else:
                infos.append(atoll.sessions.delete(session_id))
    if json:
        output.as_json(infos)
        return
    for info in infos:
        output.line(info.id)


for command in (
    session_lifecycle.start,
    session_lifecycle.stop,
    session_lifecycle.archive,
    session_lifecycle.pause,
    session_lifecycle.resume,
    session_lifecycle.update,
    session_lifecycle.extend,
    session_lifecycle.clone,
    files.cp,
    files.ls,
    files.cat,
    files.search,
    files.watch,
    files.checkpoint,
    shell,
):
    app.command(command.__name__)(command)
