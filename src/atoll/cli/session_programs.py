"""`atoll session …`: run programs, list background processes, install packages."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import output
from atoll.cli.option_parsing import environment
from atoll.cli.options import Cwd, Follow, Json, ProgramOptions, SessionId
from atoll.cli.remote import connected, remote
from atoll.cli.session_options import AllowVersionConflicts, InstallTimeout

if TYPE_CHECKING:
    from atoll.sdk.sync import Atoll
    from atoll.sdk.values import Packages, ProcessInfo


@remote(table={"PID": "pid", "NAME": "name", "EXECUTION": "execution_id"})
def ps(
    atoll: "Atoll",
    session_id: SessionId,
    end: Annotated[bool, typer.Option("--end", help="Kill them with their children.")] = False,
) -> "list[ProcessInfo]":
    """List background processes that executions of a session left running."""
    session = atoll.sessions.get(session_id)
    return session.end_processes() if end else session.processes()


def _print_installed(packages: "Packages") -> None:
    for line in packages.installed:
        output.line(line)


@remote(show=_print_installed)
def install(
    atoll: "Atoll",
    session_id: SessionId,
    dependency: Annotated[
        list[str],
        typer.Argument(metavar="PACKAGE...", help='Packages, like "requests" or "pandas>=2".'),
    ],
    install_timeout: InstallTimeout = None,
    allow_version_conflicts: AllowVersionConflicts = None,
) -> "Packages":
    """Install Python packages in a session. Later executions can import them."""
    return atoll.sessions.get(session_id).install(
        dependency,
        timeout=install_timeout,
        allow_version_conflicts=bool(allow_version_conflicts),
    )


@dataclass(kw_only=True)
class ExecOptions:
    code: Annotated[str | None, typer.Option("--code", "-c", help="Code to run.")] = None
    language: Annotated[
        str,
        typer.Option("--language", "-l", help="Language of the code: python, javascript, shell."),
    ] = "python"
    cwd: Cwd = None
    execution_id: Annotated[
        str | None,
        typer.Option(
            "--execution-id", help="Id of your choice. Repeating it does not run anything twice."
        ),
    ] = None
    follow: Follow = True


@connected
def exec_(
    atoll: "Atoll",
    session_id: SessionId,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- COMMAND [ARGS]...]", help="Command; with --code, arguments of the code."
        ),
    ] = None,
    *,
    options: ExecOptions,
    program: ProgramOptions,
    json: Json = False,
) -> None:
    """
    Run a command, or code, in a session and exit with its exit code.

    Output is shown as it arrives. Ctrl-C cancels the execution.
    """
    from atoll.cli.execution_output import show as show_live
    from atoll.cli.program_input import read_event, read_stdin

    code = options.code
    if code is None and not words:
        raise typer.BadParameter("give a command after --, or --code.", param_hint="COMMAND")
    event, variables = read_event(program.event), environment(program.env)
    stdin = read_stdin(program.stdin)
    execution = atoll.sessions.get(session_id).submit(
        code,
        language=options.language,
        command=words if code is None else None,
        args=words or [] if code is not None else (),
        event=event,
        timeout=program.timeout,
        env=variables,
        stdin=stdin,
        cwd=options.cwd,
        execution_id=options.execution_id,
    )
    if not options.follow:
        output.as_json(execution.status()) if json else output.line(execution.id)
        return
    raise typer.Exit(show_live(execution, json=json))
