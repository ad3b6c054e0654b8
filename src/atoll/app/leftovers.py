"""
Finds and removes what servers left on this machine whose data directory was removed.

Nothing is touched whose data directory exists or whose server lives. Of Docker engines only the one
that the settings name is asked, and only containers are removed, never volumes: these have files.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import structlog

from atoll.drivers.local import leftovers as local
from atoll.drivers.shared import data_directories
from atoll.drivers.shared.data_directories import NODE_DIRECTORY
from atoll.errors import AtollError, PermanentError

if TYPE_CHECKING:
    from pathlib import Path

    from atoll.drivers.shared.data_directories import Note
    from atoll.settings import Settings

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Leftovers:
    data_dir: Path
    instances: int
    containers: int
    error: str | None = None
    """Why they could not all be removed."""


async def collect(settings: Settings, *, dry_run: bool = False) -> list[Leftovers]:
    """What was removed, or with `dry_run` would be."""
    found = []
    for note in await asyncio.to_thread(data_directories.known):
        instances = containers = 0
        error = None
        try:
            with data_directories.removed(note, forget=not dry_run) as gone:
                if not gone:
                    continue
                node = note.data_dir / NODE_DIRECTORY
                instances = await asyncio.to_thread(local.count, settings.local, node)
                if note.docker_node is not None:
                    containers = await _containers(settings, note, remove=not dry_run)
                if not dry_run:
                    await asyncio.to_thread(local.remove, settings.local, node)
        except (AtollError, OSError) as reason:
            error = str(reason)
        if instances or containers or error:
            found.append(Leftovers(note.data_dir, instances, containers, error))
            log.info("leftovers.found", **asdict(found[-1]))
    return found


async def _containers(settings: Settings, note: Note, *, remove: bool) -> int:
    # Its client takes time to import, which others need not spend.
    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.leftovers import containers

    assert note.docker_node is not None
    if Engine(settings.docker).url != note.docker_url:
        raise PermanentError(
            f"Its containers are on the Docker engine at {note.docker_url}. Set ATOLL_DOCKER__URL "
            "to that one to remove them.",
            code="engine_unavailable",
        )
    return await containers(settings.docker, note.docker_node, remove=remove)
