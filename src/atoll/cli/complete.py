"""Completion of ids, when a server answers before anybody would notice the wait."""

import typer

_PATIENCE = 0.5


def session_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _sessions(ctx, incomplete, "running")


def resting_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Of those that can be started."""
    return _sessions(ctx, incomplete, "stopped", "archived", "paused")


def _sessions(ctx: typer.Context, incomplete: str, *statuses: str) -> list[tuple[str, str]]:
    from itertools import islice

    from atoll.cli.options import connect
    from atoll.errors import AtollError

    try:
        with connect(ctx.params.get("url"), ctx.params.get("api_key"), _PATIENCE) as atoll:
            sessions = [
                session.info
                for status in statuses
                for session in islice(atoll.sessions.list(status=status), 50)
            ]
    except AtollError:
        return []
    return [(info.id, info.template_id) for info in sessions if info.id.startswith(incomplete)]


def template_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    from itertools import islice

    from atoll.cli.options import connect
    from atoll.errors import AtollError

    try:
        with connect(ctx.params.get("url"), ctx.params.get("api_key"), _PATIENCE) as atoll:
            templates = list(islice(atoll.templates.list(), 50))
    except AtollError:
        return []
    return [(found.id, found.name) for found in templates if found.id.startswith(incomplete)]


def execution_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    from itertools import islice

    from atoll.cli.options import connect
    from atoll.errors import AtollError

    try:
        with connect(ctx.params.get("url"), ctx.params.get("api_key"), _PATIENCE) as atoll:
            found = list(islice(atoll.executions.list(status="running"), 50))
    except AtollError:
        return []
    return [(info.id, info.session_id) for info in found if info.id.startswith(incomplete)]
