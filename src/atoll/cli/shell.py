"""`atoll session shell`."""

import os
import signal
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import output
from atoll.cli.completion import session_ids, template_ids
from atoll.cli.options import (
    DEFAULT_URL,
    ApiKey,
    Cpu,
    Disk,
    Env,
    MaxProcesses,
    Memory,
    Url,
    environment,
)

if TYPE_CHECKING:
    from atoll.sdk.executions import AsyncExecution
    from atoll.sdk.session import AsyncSession
    from atoll.sdk.values import ConsoleExit

TIMED_OUT = 124
_LIFE = 1800 + 60
"""Seconds of life of a session for one shell: as long as an execution may take, and its start."""


def shell(
    session_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[SESSION]", help="Its id; else a new one.", autocompletion=session_ids
        ),
    ] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND [ARGS]...]", help="Instead of a shell."),
    ] = None,
    command: Annotated[
        str | None, typer.Option("--command", "-c", help="Instead of a shell: a line for one.")
    ] = None,
    attach: Annotated[
        str | None,
        typer.Option("--attach", metavar="EXECUTION", help="Go on with one that was left."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="With --attach: never type.")] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", "-t", help="Seconds; else as long as allowed.")
    ] = None,
    env: Env = None,
    cwd: Annotated[str | None, typer.Option(help="Where to begin; /workspace.")] = None,
    template: Annotated[
        str | None,
        typer.Option("--template", autocompletion=template_ids, help="Of a new session."),
    ] = None,
    cpu: Cpu = None,
    memory: Memory = None,
    disk: Disk = None,
    max_processes: MaxProcesses = None,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    """
    Open a shell in a session and end with its exit code.

    On a terminal everything goes through, Ctrl-C too; Ctrl-P Ctrl-Q leaves it running. Otherwise
    stdin is piped in to its end. A session made for it ends with it.
    """
    from atoll.cli import terminal
    from atoll.sdk.client import AsyncAtoll

    options = (template, cpu, memory, disk, max_processes)
    if attach is not None and (session_id or command or any(options)):
        raise typer.BadParameter("--attach names all there is to name.", param_hint="--attach")
    if session_id is not None and any(option is not None for option in options):
        raise typer.BadParameter("these options are for a new session.", param_hint="SESSION")
    if command is not None and words:
        raise typer.BadParameter("give --command or words after --, one of the two.")
    if watch and attach is None:
        raise typer.BadParameter("there is nothing to watch without --attach.")
    line = ["sh", "-c", command] if command is not None else words or None
    variables = environment(env)
    here = terminal.on_terminal()
    if here:
        variables.setdefault("TERM", os.environ.get("TERM") or "xterm")

    async def main() -> int:
        target = url or os.environ.get("ATOLL_URL") or DEFAULT_URL
        async with AsyncExitStack() as stack:
            atoll = await stack.enter_async_context(AsyncAtoll(target, api_key=api_key))
            own: AsyncSession | None = None
            if attach is not None:
                execution = atoll.execution(attach)
            else:
                if session_id is None:
                    own = session = await atoll.sessions.create(
                        template,
                        timeout=_LIFE,
                        cpu=cpu,
                        memory=memory,
                        disk=disk,
                        max_processes=max_processes,
                    )
                else:
                    session = await atoll.sessions.get(session_id)
                rows, cols = terminal.size() if here else (None, None)
                try:
                    execution = await session.interactive(
                        line, rows=rows, cols=cols, timeout=timeout, env=variables, cwd=cwd
                    )
                except BaseException:
                    await _delete(own)
                    raise
            return await _talk(execution, own, here=here, watch=watch, attached=attach is not None)

    raise typer.Exit(terminal.run(main))


async def _talk(
    execution: "AsyncExecution",
    own: "AsyncSession | None",
    *,
    here: bool,
    watch: bool,
    attached: bool,
) -> int:
    from atoll.cli import terminal
    from atoll.sdk.retry import best_effort

    try:
        async with execution.console(watch=watch) as console:
            ended = await terminal.talk(console, terminal=here, watch=watch, attached=attached)
    except terminal.Detached:
        output.note(f"left running; go on with: atoll session shell --attach {execution.id}")
        return 0
    except BaseException:
        # Nobody will come back for what was only made for this.
        if not attached and own is None:
            await best_effort(execution.cancel())
        await _delete(own)
        raise
    await _delete(own)
    return _exit_code(ended)


async def _delete(own: "AsyncSession | None") -> None:
    from atoll.sdk.retry import best_effort

    if own is not None:
        await best_effort(own.delete())


def _exit_code(ended: "ConsoleExit") -> int:
    if ended.error is not None and ended.error.code != "exit":
        output.error(ended.error.message, ended.error.code)
    if ended.status == "completed":
        return ended.exit_code or 0
    if ended.status == "timeout":
        return TIMED_OUT
    if ended.signal:
        with suppress(KeyError):
            return 128 + signal.Signals[ended.signal]
    return ended.exit_code or 1
