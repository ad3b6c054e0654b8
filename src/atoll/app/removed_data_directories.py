"""
Finds and removes instances and containers of servers whose data directory was deleted.

Nothing of a data directory that exists, or of a running server, is touched. Only the Docker engine
of the settings is searched, and only containers are removed, never volumes, which contain files.
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
    """Why some could not be removed."""


async def collect(settings: Settings, *, dry_run: bool = False) -> list[Leftovers]:
    """Remove them; what was removed, or would be with `dry_run`."""
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
    # Imported here, because the Docker client takes time to import.
    from atoll.drivers.docker.engine import Engine
    from atoll.drivers.docker.leftovers import containers

    assert note.docker_node is not None
    if Engine(settings.docker).url != note.docker_url:
        raise PermanentError(
            f"Its containers are on the Docker engine at {note.docker_url}. To remove them, set "
            "ATOLL_DOCKER__URL to that engine.",
            code="engine_unavailable",
        )
    return await containers(settings.docker, note.docker_node, remove=remove)
