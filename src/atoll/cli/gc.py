"""`atoll gc`."""

from typing import Annotated

import typer

from atoll.cli import exit_codes, output
from atoll.cli.options import DataDir, Json, settings


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be removed.")
    ] = False,
    stop_sessions: Annotated[
        bool,
        typer.Option(
            "--stop-sessions",
            help="Also end all sessions of the data directory. No server may be using it.",
        ),
    ] = False,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """
    Remove leftovers of servers whose data directory no longer exists.

    These are instances with their mounts, loop devices and control groups, and containers. Every
    `atoll serve` does the same when it starts. Running servers are not affected, and files are
    never removed.
    """
    chosen = settings(data_dir=data_dir)
    import asyncio

    from atoll.app import removed_data_directories, server
    from atoll.app.logs import configure_logging

    configure_logging("warning", as_json=False)
    ended = asyncio.run(server.stop_sessions(chosen)) if stop_sessions and not dry_run else 0
    found = asyncio.run(removed_data_directories.collect(chosen, dry_run=dry_run))
    if ended and not json:
        output.line(f"Ended {ended} running session(s).")
    if json:
        output.as_json(found)
    elif not found:
        output.line("Nothing to remove.")
    else:
        rows = [
            (str(one.data_dir), one.instances, one.containers, one.error or "") for one in found
        ]
        output.table(("DATA DIRECTORY", "INSTANCES", "CONTAINERS", "ERROR"), rows)
    if any(one.error is not None for one in found):
        raise typer.Exit(exit_codes.FAILED)
