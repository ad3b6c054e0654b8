"""`atoll session …`."""

from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import files, option_parsing, output, session_lifecycle
from atoll.cli.completion import session_ids, template_ids
from atoll.cli.options import (
    ApiKey,
    Capacity,
    Cpu,
    Disk,
    Env,
    Json,
    MaxProcesses,
    Memory,
    Url,
    connect,
    environment,
)
from atoll.cli.session_lifecycle import (
    ArchiveAfter,
    AutoStart,
    DeleteAfter,
    IdleTimeout,
    Label,
    SessionId,
)
from atoll.cli.shell import shell

if TYPE_CHECKING:
    from atoll.sdk.values import SessionInfo

app = typer.Typer(help="Sandboxes of a server.", no_args_is_help=True, rich_markup_mode=None)

InstallTimeout = Annotated[
    int | None, typer.Option("--install-timeout", help="Seconds for the packages; 300.")
]
Conflicts = Annotated[
    bool,
    typer.Option(
        "--allow-version-conflicts", help="Packages may take the place of the template's."
    ),
]


@app.command()
def create(
    template: Annotated[
        str | None, typer.Option("--template", autocompletion=template_ids, help="Template id.")
    ] = None,
    timeout: Annotated[int | None, typer.Option(help="Seconds of life.")] = None,
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    max_processes: MaxProcesses = None,
    capacity: Capacity = None,
    env: Env = None,
    dependency: Annotated[
        list[str] | None,
        typer.Option("--dependency", "-d", help='Like "pandas>=2". May be repeated.'),
    ] = None,
    install_timeout: InstallTimeout = None,
    allow_version_conflicts: Conflicts = False,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            "--secret",
            metavar="NAME",
            help="A secret; its value comes from the variable of this name, or is asked for. "
            "May be repeated.",
        ),
    ] = None,
    secret_file: Annotated[
        list[str] | None,
        typer.Option(
            "--secret-file", metavar="NAME=PATH", help="One from a file, as it is. May be repeated."
        ),
    ] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(
            "--volume", metavar="VOLUME:PATH[:ro|rw]", help="Read-only unless rw. May be repeated."
        ),
    ] = None,
    workspace_mode: Annotated[
        str | None, typer.Option(help="sync, or mount: in the server's bucket itself.")
    ] = None,
    durability: Annotated[
        str | None,
        typer.Option(help="background, or execution: files are saved before a result is final."),
    ] = None,
    started_from: Annotated[
        str | None,
        typer.Option("--from", metavar="SESSION", help="Begin with the files of this session."),
    ] = None,
    label: Label = None,
    auto_start: AutoStart = None,
    idle_timeout: IdleTimeout = None,
    archive_after: ArchiveAfter = None,
    delete_after: DeleteAfter = None,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Make a session and print its id."""
    variables, mounts = environment(env), option_parsing.volumes(volume)
    secrets, labels = option_parsing.secrets(secret, secret_file), session_lifecycle.labels(label)
    with connect(url, api_key) as atoll:
        session = atoll.sessions.create(
            template,
            timeout=timeout,
            cpu=cpu,
            memory=memory,
            disk=disk,
            max_processes=max_processes,
            env=variables,
            capacity=capacity,
            dependencies=dependency or (),
            install_timeout=install_timeout,
            allow_version_conflicts=allow_version_conflicts or None,
            secrets=secrets,
            volumes=mounts,
            workspace_mode=workspace_mode,
            durability=durability,
            started_from=started_from,
            labels=labels,
            auto_start=auto_start,
            idle_timeout=idle_timeout,
            archive_after=archive_after,
            delete_after=delete_after,
        )
    output.as_json(session.info) if json else output.line(session.id)


@app.command("list")
def list_(
    status: Annotated[str | None, typer.Option(help="Only those in this status.")] = None,
    template: Annotated[
        str | None, typer.Option(autocompletion=template_ids, help="Only those of this template.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, the newest.")] = 100,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List sessions, newest first, ended ones included."""
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
    """Show one session: what is wanted of it, what it is, why, and what is next by itself."""
    with connect(url, api_key) as atoll:
        info = atoll.sessions.get(session_id).info
    if json:
        output.as_json(info)
    else:
        output.details(session_lifecycle.shown(info))


@app.command()
def ps(
    session_id: SessionId,
    end: Annotated[bool, typer.Option("--end", help="End them, and what they started.")] = False,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """List what executions of a session left running."""
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
        list[str], typer.Argument(metavar="PACKAGE...", help='Like "requests" or "pandas>=2".')
    ],
    install_timeout: InstallTimeout = None,
    allow_version_conflicts: Conflicts = False,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """Add Python packages to a session; what runs afterwards finds them."""
    with connect(url, api_key) as atoll:
        packages = atoll.sessions.get(session_id).install(
            dependency,
            timeout=install_timeout,
            allow_version_conflicts=allow_version_conflicts,
        )
    if json:
        output.as_json(packages)
        return
    for line in packages.installed:
        output.line(line)


@app.command("exec")
def exec_(
    session_id: SessionId,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND [ARGS]...]", help="With --code: its arguments."),
    ] = None,
    code: Annotated[str | None, typer.Option("--code", "-c", help="Run this code.")] = None,
    language: Annotated[
        str, typer.Option("--language", "-l", help="Of the code: python, javascript, shell.")
    ] = "python",
    event: Annotated[str | None, typer.Option(metavar="JSON", help="Given to handler().")] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", "-t", help="Seconds that it may run.")
    ] = None,
    env: Env = None,
    cwd: Annotated[str | None, typer.Option(help="Where to run it; /workspace.")] = None,
    stdin: Annotated[
        bool | None,
        typer.Option("--stdin/--no-stdin", help="Give stdin to the program; by default if piped."),
    ] = None,
    execution_id: Annotated[
        str | None,
        typer.Option("--execution-id", help="An id of your own: given again, nothing runs twice."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Or only print the execution's id.")
    ] = True,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """
    Run a command, or code, in a session and end with its exit code.

    Its output is passed on as it comes. Ctrl-C cancels it.
    """
    from atoll.cli.execution_output import show as show_live
    from atoll.cli.program_input import read_event, read_stdin

    if code is None and not words:
        raise typer.BadParameter("give a command after --, or --code.", param_hint="COMMAND")
    option_parsing, variables, fed = read_event(event), environment(env), read_stdin(stdin)
    with connect(url, api_key) as atoll:
        execution = atoll.sessions.get(session_id).submit(
            code,
            language=language,
            command=words if code is None else None,
            args=words or [] if code is not None else (),
            event=option_parsing,
            timeout=timeout,
            stdin=fed,
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
        list[str], typer.Argument(metavar="SESSION[:PATH]...", autocompletion=session_ids)
    ],
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Directories with all in them.")
    ] = False,
    url: Url = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """
    End sessions; their records and results stay readable. With a PATH, remove that file of the
    session, which goes on.
    """
    places = [(*files.place(one), ":" in one) for one in which]
    if any(named and not path for _, path, named in places):
        raise typer.BadParameter("there is no path behind the colon.", param_hint="SESSION:PATH")
    infos: list[SessionInfo] = []
    with connect(url, api_key) as atoll:
        for session_id, path, named in places:
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
