"""`atoll run`."""

import math
import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from atoll.cli.completion import template_ids
from atoll.cli.options import ApiKey, Cpu, Disk, Env, Json, MaxProcesses, Memory, environment

if TYPE_CHECKING:
    from atoll.sdk.sync import Atoll

# Longer than the life of a session that asks for none, less what its start may take.
_LONG = 240


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT | -] [ARGS]...", help="A script, - for stdin; its arguments."
        ),
    ] = None,
    code: Annotated[str | None, typer.Option("--code", "-c", help="Run this instead.")] = None,
    command: Annotated[
        bool, typer.Option("--command", help="The words are a command, not a script.")
    ] = False,
    language: Annotated[
        str | None,
        typer.Option(
            "--language", "-l", help="python, javascript, shell; else by the file's name."
        ),
    ] = None,
    event: Annotated[str | None, typer.Option(metavar="JSON", help="Given to handler().")] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", "-t", help="Seconds that it may run.")
    ] = None,
    env: Env = None,
    stdin: Annotated[
        bool | None,
        typer.Option("--stdin/--no-stdin", help="Give stdin to the program; by default if piped."),
    ] = None,
    template: Annotated[
        str | None, typer.Option("--template", autocompletion=template_ids, help="Template id.")
    ] = None,
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    max_processes: MaxProcesses = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Run it there; else ATOLL_URL, else right here.")
    ] = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """
    Run a script in a sandbox of its own and end with its exit code.

    124 is a time-out, 128 and more a signal. Needs no server. What follows the script is its own.
    """
    from atoll.cli.execution_output import show
    from atoll.cli.program_input import Program, read_event, read_script, read_stdin

    words = words or []
    if code is not None and command:
        raise typer.BadParameter("give --code or --command, one of the two.")
    if code is not None:
        program = Program(code, language or "python", args=tuple(words))
    elif not words:
        raise typer.BadParameter("name a script, or - for stdin.", param_hint="SCRIPT")
    elif command:
        program = Program(command=tuple(words))
    else:
        program = read_script(words, language)
    given = read_event(event)
    variables = environment(env)
    fed = None if program.from_stdin else read_stdin(stdin)

    # Ends like Ctrl-C does: the sandbox goes with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    life = math.ceil(timeout) + 60 if timeout and timeout > _LONG else None
    with (
        _atoll(url, api_key) as atoll,
        atoll.session(
            template, timeout=life, cpu=cpu, memory=memory, disk=disk, max_processes=max_processes
        ) as session,
    ):
        execution = session.submit(
            program.code,
            language=program.language,
            command=program.command,
            event=given,
            timeout=timeout,
            stdin=fed,
            env=variables,
            args=program.args,
        )
        status = show(execution, json=json, others=atoll.url is not None)
    _end(status)


def _atoll(url: str | None, api_key: str | None) -> "Atoll":
    from atoll.sdk.sync import Atoll

    url = url or os.environ.get("ATOLL_URL") or None
    if url is not None:
        return Atoll(url, api_key=api_key)
    # One session is all there will be: ready instances would only compete with it.
    return Atoll(api_key=api_key, pool={"size": 0})


def _end(status: int) -> NoReturn:
    raise typer.Exit(status)
