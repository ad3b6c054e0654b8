"""`atoll run`."""

import math
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import exit_codes
from atoll.cli.option_parsing import environment
from atoll.cli.options import ApiKey, Json, LimitOptions, ProgramOptions, Template, flat

if TYPE_CHECKING:
    from atoll.cli.program_input import Program
    from atoll.sdk.sync import Atoll

_MAX_DEFAULT_TIMEOUT = 240
"""Seconds that fit into the default lifetime of a session, together with its start."""


@dataclass(kw_only=True)
class ScriptOptions:
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCRIPT | -] [ARGS]...", help="Script, or - for stdin, and its arguments."
        ),
    ] = None
    code: Annotated[str | None, typer.Option("--code", "-c", help="Code instead of a script.")] = (
        None
    )
    command: Annotated[
        bool, typer.Option("--command", help="The words are a command, not a script.")
    ] = False
    language: Annotated[
        str | None,
        typer.Option(
            "--language",
            "-l",
            help="python, javascript or shell. Default: by the script's file name, else python.",
        ),
    ] = None


@flat
def run(
    script: ScriptOptions,
    template: Template = None,
    *,
    options: ProgramOptions,
    limits: LimitOptions,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", help="URL of a server. Default: ATOLL_URL, else run on this machine."
        ),
    ] = None,
    api_key: ApiKey = None,
    json: Json = False,
) -> None:
    """
    Run a script in a new sandbox and exit with its exit code. Needs no server.

    Exit code 124 means a timeout, 128 and above a signal. Words after the script are its arguments.
    """
    from atoll.cli.execution_output import show
    from atoll.cli.program_input import read_event, read_stdin

    program = _program(script)
    event = read_event(options.event)
    variables = environment(options.env)
    stdin = None if program.from_stdin else read_stdin(options.stdin)
    timeout = options.timeout
    lifetime = math.ceil(timeout) + 60 if timeout and timeout > _MAX_DEFAULT_TIMEOUT else None

    # Like Ctrl-C: the context managers below delete the sandbox.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(exit_codes.by_signal(signal.SIGTERM)))
    with (
        _atoll(url, api_key) as atoll,
        atoll.session(template, timeout=lifetime, **vars(limits)) as session,
    ):
        execution = session.submit(
            program.code,
            language=program.language,
            command=program.command,
            event=event,
            timeout=timeout,
            stdin=stdin,
            env=variables,
            args=program.args,
        )
        status = show(execution, json=json, others=atoll.url is not None)
    raise typer.Exit(status)


def _program(script: ScriptOptions) -> "Program":
    from atoll.cli.program_input import Program, read_script

    words, code = script.words or [], script.code
    if code is not None and script.command:
        raise typer.BadParameter("give either --code or --command, not both.")
    if code is not None:
        return Program(code, script.language or "python", args=tuple(words))
    if not words:
        raise typer.BadParameter("give a script, or - for stdin.", param_hint="SCRIPT")
    if script.command:
        return Program(command=tuple(words))
    return read_script(words, script.language)


def _atoll(url: str | None, api_key: str | None) -> "Atoll":
    from atoll.sdk.endpoint import server_url
    from atoll.sdk.sync import Atoll

    if (server := server_url(url or None)) is not None:
        return Atoll(server, api_key=api_key)
    # There is only one session: starting further instances would slow it down.
    return Atoll(api_key=api_key, pool={"size": 0})
