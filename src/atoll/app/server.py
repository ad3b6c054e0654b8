"""`atoll serve`: one process, or several workers, until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import resource
from typing import TYPE_CHECKING

import structlog

from atoll.api.rest.server import uvicorn_server
from atoll.api.rest.server.open_files import raise_open_files
from atoll.app import workers
from atoll.app.api_keys import KEY_FILE, ensure_first_key
from atoll.app.application import application
from atoll.app.backends import find_node_id
from atoll.app.logs import configure_logging
from atoll.app.stores import names_database, open_store
from atoll.drivers.local import cgroup_delegation
from atoll.drivers.shared.data_directories import NODE_DIRECTORY
from atoll.errors import NotFound, TemporaryError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from atoll.settings import Settings


log = structlog.get_logger(__name__)


def serve(settings: Settings, *, stop_sessions: bool = False) -> None:
    """Serve until SIGTERM or SIGINT. Sessions continue to run, unless `stop_sessions` is set."""
    uvicorn_server.check_exposure(settings)
    workers.check(settings)
    # A core file would contain secrets.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    raise_open_files()
    configure_logging(settings.log_level, as_json=settings.log_json)
    if settings.driver == "local":
        # Before workers are forked, because they inherit the group.
        cgroup_delegation.acquire(settings.local, settings.data_dir / NODE_DIRECTORY)
    with uvicorn_server.listen(settings.host, settings.port) as listener:
        port = listener.getsockname()[1]

        def welcome() -> None:
            key_file = None if settings.api_key else settings.data_dir / KEY_FILE
            uvicorn_server.print_welcome(settings, port, key_file)

        def work(ready: workers.Ready) -> None:
            # Every worker ends all sessions: the last one also ends those that the others created
            # meanwhile.
            uvicorn_server.run(_serve(settings, listener, ready, ready.parent, stop_sessions))

        if settings.workers == 1:
            uvicorn_server.run(_serve(settings, listener, welcome, None, stop_sessions))
        elif code := workers.Workers(settings, work).run(welcome):
            raise SystemExit(code)
    if not stop_sessions:
        count = asyncio.run(_left_running(settings))
        uvicorn_server.print_farewell(settings, count)


async def _left_running(settings: Settings) -> int:
    """The number of sessions of this node with an instance; 0 if the database is unavailable."""
    node_id = await find_node_id(settings, own=not names_database(settings))
    store = open_store(settings)
    count, after = 0, ""
    try:
        await store.open()
        while held := await store.sessions.holdings(node_id, limit=1000, after=after):
            count += sum(one.instance_id is not None for one in held)
            after = held[-1].session_id
    except TemporaryError as error:
        log.warning("sessions.not_counted", error=error.message)
    finally:
        await store.close()
    return count


async def stop_sessions(settings: Settings) -> int:
    """
    End all sessions of a data directory that no server uses; returns how many had an instance.
    """
    if not settings.data_dir.is_dir():
        raise NotFound(f"There is no directory {settings.data_dir}.", code="data_dir_not_found")
    count = await _left_running(settings)
    async with application(settings) as found:
        await found.sessions.end_all()
    return count


async def _serve(
    settings: Settings,
    listener: socket.socket,
    ready: Callable[[], None],
    parent: int | None,
    stop_sessions: bool,
) -> None:
    url = uvicorn_server.address(settings, listener.getsockname()[1])
    async with application(settings, url=url) as app:
        await ensure_first_key(settings, app.keys)
        # Handle signals before the welcome is printed: its reader may send SIGTERM at once.
        http = uvicorn_server.prepare(app.web, settings, parent, app.feed.close)
        # Collections while it serves need not visit what the start has made.
        gc.freeze()
        ready()
        building = asyncio.create_task(app.documented.build(), name="documented routes")
        await http.serve(sockets=[listener])
        await building
        if stop_sessions:
            await app.sessions.end_all()
