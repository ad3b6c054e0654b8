"""`atoll session shell`."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import exit_codes, output
from atoll.cli.completion import session_ids
from atoll.cli.option_parsing import environment
from atoll.cli.options import ApiKey, Cwd, Env, LimitOptions, Template, Timeout, Url, address, flat

if TYPE_CHECKING:
    from atoll.sdk.executions import AsyncExecution
    from atoll.sdk.session import AsyncSession

_LIFETIME = 1800 + 60
"""Seconds that a session for one shell exists: the longest execution, and its start."""


@dataclass(kw_only=True)
class ShellOptions:
    session_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[SESSION]",
            help="Session id. Default: a new session.",
            autocompletion=session_ids,
        ),
    ] = None
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND [ARGS]...]", help="Command instead of a shell."),
    ] = None
    command: Annotated[
        str | None, typer.Option("--command", "-c", help="Shell command line to run.")
    ] = None
    attach: Annotated[
        str | None,
        typer.Option("--attach", metavar="EXECUTION", help="Attach to a detached execution."),
    ] = None
    watch: Annotated[bool, typer.Option("--watch", help="With --attach: do not type.")] = False


@dataclass(kw_only=True)
class ProcessOptions:
    template: Template = None
    timeout: Timeout = None
    env: Env = None
    cwd: Cwd = None


@flat
def shell(
    options: ShellOptions,
    limits: LimitOptions,
    process: ProcessOptions,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """
    Open a shell in a session and exit with its exit code.

    On a terminal all keys go to the shell, including Ctrl-C. Ctrl-P Ctrl-Q detaches and leaves it
    running. Without a terminal, stdin is piped to the shell. A session that was created for the
    shell ends with it.
    """
    from atoll.cli import terminal
    from atoll.sdk.client import AsyncAtoll

    attach, command = options.attach, options.command
    new_session = {"template": process.template, **vars(limits)}
    if attach is not None and (options.session_id or command or any(new_session.values())):
        raise typer.BadParameter(
            "cannot be combined with a session, a command or limits.", param_hint="--attach"
        )
    if options.session_id is not None and any(one is not None for one in new_session.values()):
        raise typer.BadParameter(
            "--template and limits are for a new session.", param_hint="SESSION"
        )
    if command is not None and options.words:
        raise typer.BadParameter("give either --command or a command after --, not both.")
    if options.watch and attach is None:
        raise typer.BadParameter("--watch needs --attach.")
    line = ["sh", "-c", command] if command is not None else options.words or None
    variables = environment(process.env)
    on_terminal = terminal.on_terminal()
    if on_terminal:
        variables.setdefault("TERM", os.environ.get("TERM") or "xterm")

    async def main() -> int:
        async with AsyncAtoll(address(url), api_key=api_key) as atoll:
            created: AsyncSession | None = None
            if attach is not None:
                execution = atoll.execution(attach)
            else:
                if options.session_id is None:
                    created = session = await atoll.sessions.create(
                        timeout=_LIFETIME, **new_session
                    )
                else:
                    session = await atoll.sessions.get(options.session_id)
                rows, cols = terminal.size() if on_terminal else (None, None)
                try:
                    execution = await session.interactive(
                        line,
                        rows=rows,
                        cols=cols,
                        timeout=process.timeout,
                        env=variables,
                        cwd=process.cwd,
                    )
                except BaseException:
                    await _delete(created)
                    raise
            return await _talk(
                execution,
                created,
                on_terminal=on_terminal,
                watch=options.watch,
                attached=attach is not None,
            )

    raise typer.Exit(terminal.run(main))


async def _talk(
    execution: "AsyncExecution",
    created: "AsyncSession | None",
    *,
    on_terminal: bool,
    watch: bool,
    attached: bool,
) -> int:
    from atoll.cli import terminal
    from atoll.sdk.retry import best_effort

    try:
        async with execution.console(watch=watch) as console:
            ended = await terminal.talk(
                console, terminal=on_terminal, watch=watch, attached=attached
            )
    except terminal.Detached:
        output.note(f"detached; to attach again: atoll session shell --attach {execution.id}")
        return 0
    except BaseException:
        # Nothing else uses an execution that was started for this shell.
        if not attached and created is None:
            await best_effort(execution.cancel())
        await _delete(created)
        raise
    await _delete(created)
    if ended.error is not None and ended.error.code != "exit":
        output.error(ended.error.message, ended.error.code)
    return exit_codes.of_program(ended)


async def _delete(created: "AsyncSession | None") -> None:
    from atoll.sdk.retry import best_effort

    if created is not None:
        await best_effort(created.delete())
