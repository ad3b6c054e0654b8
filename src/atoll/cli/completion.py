"""Completion of ids, when a server answers before anybody would notice the wait."""

import re

import typer

from atoll.cli.output import one_line

_PATIENCE = 0.5
_SAFE = re.compile(r"[A-Za-z0-9._:-]+")
"""What a shell takes as one plain word: a server must not put a command on somebody's line."""


def _completions(found: list[tuple[str, str]], incomplete: str) -> list[tuple[str, str]]:
    return [
        (name, one_line(words))
        for name, words in found
        if name.startswith(incomplete) and _SAFE.fullmatch(name)
    ]


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
    return _completions([(info.id, info.template_id) for info in sessions], incomplete)


def template_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    from itertools import islice

    from atoll.cli.options import connect
    from atoll.errors import AtollError

    try:
        with connect(ctx.params.get("url"), ctx.params.get("api_key"), _PATIENCE) as atoll:
            templates = list(islice(atoll.templates.list(), 50))
    except AtollError:
        return []
    return _completions([(found.id, found.name) for found in templates], incomplete)


def execution_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    from itertools import islice

    from atoll.cli.options import connect
    from atoll.errors import AtollError

    try:
        with connect(ctx.params.get("url"), ctx.params.get("api_key"), _PATIENCE) as atoll:
            found = list(islice(atoll.executions.list(status="running"), 50))
    except AtollError:
        return []
    return _completions([(info.id, info.session_id) for info in found], incomplete)
