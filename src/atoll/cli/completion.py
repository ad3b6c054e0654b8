"""Shell completion of ids. Completes nothing if the server does not respond quickly."""

import re
from typing import TYPE_CHECKING

import typer

from atoll.cli.output import one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from atoll.sdk.sync import Atoll

    Ids = Callable[[Atoll], Iterator[tuple[str, str]]]

_TIMEOUT = 0.5
_MAX_IDS = 50
_SAFE = re.compile(r"[A-Za-z0-9._:-]+")
"""Words without special meaning in a shell: a server must not inject commands."""


def session_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _complete(ctx, incomplete, _sessions("running"))


def startable_session_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of stopped, archived and paused sessions."""
    found = [_sessions(status) for status in ("stopped", "archived", "paused")]
    return _complete(ctx, incomplete, *found)


def template_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _complete(
        ctx, incomplete, lambda atoll: ((one.id, one.name) for one in atoll.templates.list())
    )


def execution_ids(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    return _complete(
        ctx,
        incomplete,
        lambda atoll: ((one.id, one.session_id) for one in atoll.executions.list(status="running")),
    )


def _sessions(status: str) -> "Ids":
    return lambda atoll: (
        (one.id, one.info.template_id) for one in atoll.sessions.list(status=status)
    )


def _complete(ctx: typer.Context, incomplete: str, *lists: "Ids") -> list[tuple[str, str]]:
    from itertools import islice

    from atoll.cli.options import connect
    from atoll.errors import AtollError

    try:
        with connect(ctx.params.get("url"), ctx.params.get("api_key"), _TIMEOUT) as atoll:
            found = [pair for ids in lists for pair in islice(ids(atoll), _MAX_IDS)]
    except AtollError:
        return []
    return [
        (name, one_line(text))
        for name, text in found
        if name.startswith(incomplete) and _SAFE.fullmatch(name)
    ]
