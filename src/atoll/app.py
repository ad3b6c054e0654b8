"""
The composition root: the only module that names concrete back-ends.

`application` puts the parts together and takes them apart again, whatever happens in between; a
server, an embedded Atoll and the local commands all go through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mimetypes
import os
import secrets
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client import CollectorRegistry

from atoll import ids
from atoll.api.rest import metrics, server
from atoll.api.rest.app import build
from atoll.api.rest.context import Services
from atoll.clock import SystemClock
from atoll.drivers.local import host
from atoll.drivers.local.driver import NODE, LocalDriver
from atoll.drivers.local.workspaces import remove_tree
from atoll.errors import Conflict
from atoll.model.key import Scope, digest
from atoll.model.node import Node
from atoll.reconcile.pool import PoolRefill
from atoll.reconcile.recovery import Recovery
from atoll.reconcile.sessions import Sweep
from atoll.service.executions import Executions
from atoll.service.files import Files
from atoll.service.keys import Keys
from atoll.service.nodes import Nodes
from atoll.service.pool import Pool
from atoll.service.sessions import Sessions
from atoll.service.tasks import Tasks
from atoll.service.templates import Templates
from atoll.settings import Settings
from atoll.stores.sql.store import SqlStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from starlette.types import ASGIApp

    from atoll.drivers.local.host import Check
    from atoll.settings import LocalSettings

NODE_ID = "local"
DATABASE = "atoll.db"
KEY_FILE = "key"
LOCK_FILE = "lock"
UNLOCKED = ".new-"
"""How the name of an embedded Atoll's directory begins until it is locked."""
ENVIRONMENT = "environment"
"""Name of the key that comes from ATOLL_API_KEY."""

log = structlog.get_logger(__name__)


def open_store(settings: Settings) -> SqlStore:
    return SqlStore(f"sqlite:///{settings.data_dir / DATABASE}", settings.sqlite)


def make_data_dir(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)


class Application:
    """The parts, as the server needs to reach them."""

    def __init__(self, web: ASGIApp, sessions: Sessions, keys: Keys) -> None:
        self.web = web
        self.sessions = sessions
        self.keys = keys


@asynccontextmanager
async def application(settings: Settings, *, embedded: bool = False) -> AsyncIterator[Application]:
    """
    A whole Atoll on `settings.data_dir`. Embedded, it needs no key, and its instances end with it.
    """
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(make_data_dir, settings.data_dir)
        if not embedded:
            stack.enter_context(await asyncio.to_thread(_lock, settings.data_dir))
        await asyncio.to_thread(mimetypes.init)
        clock = SystemClock()
        tasks = Tasks()
        store = open_store(settings)
        stack.push_async_callback(store.close)
        await store.open()
        driver = LocalDriver(settings.data_dir, settings.local, settings.link)
        stack.push_async_callback(driver.close)
        await driver.open()
        templates = Templates(store, driver, clock, settings)
        await templates.ensure_default()
        pool = Pool(store, driver, clock, NODE_ID, ephemeral=embedded)
        templates.changed = pool.changed.set
        sessions = Sessions(store, driver, pool, templates, tasks, clock, settings, NODE_ID)
        executions = Executions(store, driver, sessions, tasks, clock, settings)
        keys = Keys(store, clock)
        node = Node(NODE_ID, driver.kind, f"unix://{settings.data_dir / NODE}")
        found = Services(
            sessions=sessions,
            executions=executions,
            files=Files(sessions),
            templates=templates,
            nodes=Nodes(node, store, driver, pool, clock),
            store=store,
            clock=clock,
            settings=settings,
        )
        registry = CollectorRegistry()
        metrics.register(registry, sessions, executions, pool)
        stack.push_async_callback(sessions.close)
        stack.push_async_callback(pool.close)
        stack.push_async_callback(tasks.settle, settings.shutdown_timeout.total_seconds())
        if embedded:
            stack.push_async_callback(sessions.stop_all)
        else:
            stack.callback(executions.let_go)
            await Recovery(store, driver, sessions, executions, pool).run()
        refill = PoolRefill(pool, store, settings.pool, clock)
        sweep = Sweep(store, driver, sessions, pool, clock, settings.session)
        loops = [
            asyncio.create_task(refill.run(), name="pool refill"),
            asyncio.create_task(sweep.run(), name="sweep"),
        ]
        stack.push_async_callback(_stop, loops)
        yield Application(build(found, None if embedded else keys, registry), sessions, keys)


async def _stop(loops: list[asyncio.Task[None]]) -> None:
    for loop in loops:
        loop.cancel()
    for result in await asyncio.gather(*loops, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


# Embedded


@asynccontextmanager
async def embedded(**given: Any) -> AsyncIterator[ASGIApp]:
    """Atoll inside this process, on a directory of its own that goes with it."""
    settings = Settings.read(**given)
    if not structlog.is_configured():
        # Left alone where the program that embeds us has its own way.
        configure_logging("warning", as_json=False)
    base = settings.data_dir / "embedded"
    with await asyncio.to_thread(_own_directory, base, settings.local) as place:
        try:
            async with application(
                settings.model_copy(update={"data_dir": place}), embedded=True
            ) as app:
                yield app.web
        finally:
            await asyncio.to_thread(_remove, place)


@contextlib.contextmanager
def _held(path: Path, lock: int) -> Iterator[Path]:
    try:
        yield path
    finally:
        os.close(lock)


def _lock(data_dir: Path) -> contextlib.AbstractContextManager[Path]:
    """Two servers on one data directory would both hand out its ready instances."""
    lock = os.open(data_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise Conflict(
            f"Another server uses {data_dir}. Stop it, or give --data-dir another directory.",
            code="data_dir_in_use",
        ) from None
    return _held(data_dir, lock)


def _own_directory(base: Path, local: LocalSettings) -> contextlib.AbstractContextManager[Path]:
    """
    A new directory, locked as long as this process has it; those of dead processes are removed.
    """
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    for other in base.iterdir():
        if not other.name.startswith(UNLOCKED):
            _remove_if_dead(other, local)
    name = secrets.token_hex(8)
    # Under a name that others leave alone until it is locked: they would take it for a dead one's.
    unlocked = base / f"{UNLOCKED}{name}"
    unlocked.mkdir(mode=0o700)
    lock = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return _held(unlocked.rename(base / name), lock)


def _remove_if_dead(place: Path, local: LocalSettings) -> None:
    try:
        lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # Its owner was quicker.
    except OSError as error:
        log.warning("embedded.not_removed", path=str(place), error=str(error))
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        host.remove_leftovers(local, place / NODE)
        _remove(place)
    except BlockingIOError:
        pass  # Somebody has it.
    except OSError as error:
        log.warning("embedded.not_removed", path=str(place), error=str(error))
    finally:
        os.close(lock)


def _remove(place: Path) -> None:
    try:
        remove_tree(place)
    except OSError as error:
        log.warning("embedded.not_removed", path=str(place), error=str(error))


# Local commands


def doctor(settings: Settings) -> list[Check]:
    return host.checks(settings.local, settings.data_dir / NODE)


@asynccontextmanager
async def keys(settings: Settings) -> AsyncIterator[Keys]:
    """The keys of a data directory, for its owner."""
    await asyncio.to_thread(make_data_dir, settings.data_dir)
    store = open_store(settings)
    await store.open()
    try:
        yield Keys(store, SystemClock())
    finally:
        await store.close()


async def ensure_first_key(settings: Settings, found: Keys) -> Path | None:
    """
    The key of the environment, or the one in the key file, made at the first start. A key that the
    environment gave before and gives no more is revoked.
    """
    given = settings.api_key
    for key in await found.list():
        if key.name == ENVIRONMENT and (given is None or key.digest != digest(given)):
            await found.remove(key.id)
    if given is not None:
        await found.adopt(ENVIRONMENT, Scope.FULL, given)
        return None
    path = settings.data_dir / KEY_FILE
    secret = await asyncio.to_thread(_read_or_make_key, path)
    await found.adopt("first", Scope.FULL, secret)
    return path


def _read_or_make_key(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    secret = ids.api_key()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w") as file:
        file.write(secret + "\n")
    with contextlib.suppress(FileExistsError):
        os.link(temporary, path)  # Unlike a rename, it never replaces the key of another start.
    temporary.unlink()
    return path.read_text().strip()


def serve(settings: Settings, *, stop_sessions: bool = False) -> None:
    """Serve until SIGTERM or SIGINT. Sessions outlive it, unless it ends for good."""
    server.check_exposure(settings)
    configure_logging(settings.log_level, as_json=settings.log_json)
    server.run(_serve(settings, stop_sessions))


async def _serve(settings: Settings, stop_sessions: bool) -> None:
    with server.listen(settings.host, settings.port) as listener:
        async with application(settings) as app:
            key_file = await ensure_first_key(settings, app.keys)
            # Before the welcome: who reads it may want it to end at once.
            http = server.prepare(app.web, settings)
            server.print_welcome(settings, listener.getsockname()[1], key_file)
            await http.serve(sockets=[listener])
            if stop_sessions:
                await app.sessions.stop_all()


def configure_logging(level: str, *, as_json: bool) -> None:
    """Events with fields, on stderr."""
    import sys

    render: Any = (
        structlog.processors.JSONRenderer()
        if as_json
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.ExceptionRenderer(
                structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
            )
            if as_json
            else structlog.processors.StackInfoRenderer(),
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
