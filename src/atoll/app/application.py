"""
Builds one replica of Atoll, runs it, and shuts it down: first its back-ends (`backends.py`), then
its services (`replica.py`). A server, an embedded Atoll and the local commands all use
`application`.
"""

from __future__ import annotations

import asyncio
import mimetypes
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from atoll.app.backends import open_backends
from atoll.app.data_directory import DataDirLock, make_data_dir
from atoll.drivers.shared import data_directories

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from atoll.app.replica import Application
    from atoll.settings import Settings


@asynccontextmanager
async def application(
    settings: Settings, *, embedded: bool = False, url: str | None = None
) -> AsyncIterator[Application]:
    """
    A running replica on `settings.data_dir`; other nodes reach it at `url`. An embedded one needs
    no API key, and its sessions end with it.
    """
    async with AsyncExitStack() as stack:
        lock = await _claim_data_dir(settings, stack, embedded=embedded)
        await asyncio.to_thread(mimetypes.init)
        backends = await open_backends(settings, stack, embedded=embedded)
        # Imported here: the processes of the driver start meanwhile.
        from atoll.app.replica import start_replica

        yield await start_replica(backends, stack, lock, url)


async def _claim_data_dir(
    settings: Settings, stack: AsyncExitStack, *, embedded: bool
) -> DataDirLock | None:
    await asyncio.to_thread(make_data_dir, settings.data_dir)
    lock = None
    if not embedded:
        shared = settings.redis_url is not None
        lock = await asyncio.to_thread(DataDirLock, settings.data_dir, shared=shared)
        stack.callback(lock.close)
    server_lock = await asyncio.to_thread(
        data_directories.ServerLock, settings.data_dir, temporary=embedded
    )
    stack.callback(server_lock.close)
    return lock
