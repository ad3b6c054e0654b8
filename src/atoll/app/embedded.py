"""Atoll inside the process of a program that uses it as a library."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import structlog

from atoll.app.application import application
from atoll.app.data_directory import own_directory, remove
from atoll.app.logs import configure_logging
from atoll.drivers.shared import executor_bundle
from atoll.drivers.shared.data_directories import NODE_DIRECTORY
from atoll.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from starlette.types import ASGIApp


@asynccontextmanager
async def embedded(**given: Any) -> AsyncIterator[ASGIApp]:
    """Run Atoll inside this process, in its own directory, which is removed at the end."""
    settings = Settings.read(**given)
    if not structlog.is_configured():
        # Only if the embedding program has not configured structlog.
        configure_logging("warning", as_json=False)
    base = settings.data_dir / "embedded"
    with await asyncio.to_thread(own_directory, base, settings.local) as place:
        try:
            await asyncio.to_thread(_share_executor, settings.data_dir, place)
            async with application(
                settings.model_copy(update={"data_dir": place}), embedded=True
            ) as app:
                yield app.web
        finally:
            await asyncio.to_thread(remove, place)


def _share_executor(data_dir: Path, place: Path) -> None:
    """Link the executor's bundle to the directory: it is built once for all of a data directory."""
    node = place / NODE_DIRECTORY
    node.mkdir(mode=0o700)
    with contextlib.suppress(OSError):  # Then the driver builds its own.
        bundle = executor_bundle.write(data_dir)
        (node / bundle.name).hardlink_to(bundle)
