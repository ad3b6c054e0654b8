"""
The composition root: the only module that names concrete back-ends.

`application` puts the parts together and takes them apart again, whatever happens in between; a
server, an embedded Atoll and the local commands all go through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import mimetypes
import os
import resource
import secrets
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client import CollectorRegistry

from atoll import directories, ids, leftovers, workers
from atoll.api.internal.app import Internal
from atoll.api.internal.node import NodeRoute
from atoll.api.rest import metrics, server
from atoll.api.rest.app import build
from atoll.api.rest.connections import raise_open_files
from atoll.api.rest.context import Services
from atoll.api.rest.limits import AnswerMemory, OpenStreams
from atoll.api.rest.pacing import Pacing
from atoll.blobs.choice import choose
from atoll.blobs.spool import Spool
from atoll.clock import SystemClock
from atoll.coordination.memory import MemoryCoordination
from atoll.directories import DataDirLock, give_to, make_data_dir, own_directory, remove
from atoll.drivers import known_nodes
from atoll.drivers.local import delegation, host
from atoll.drivers.local.advice import without_root
from atoll.drivers.local.buckets import Bucket
from atoll.drivers.local.driver import NODE, LocalDriver
from atoll.errors import NotFound, TemporaryError
from atoll.model.instance import Callback
from atoll.model.key import Scope, digest
from atoll.reconcile.attendance import Attendance
from atoll.reconcile.builds import BuildLoop, LayerSweep
from atoll.reconcile.checkpoints import CheckpointSweep
from atoll.reconcile.departed import Departed
from atoll.reconcile.drains import Drains
from atoll.reconcile.events import EventNews, EventSweep, Sequencer
from atoll.reconcile.executions import Adoption
from atoll.reconcile.nodes import Probe, Report
from atoll.reconcile.orphaned_blobs import OrphanSweep
from atoll.reconcile.orphans import Orphans
from atoll.reconcile.packages import PackageSweep
from atoll.reconcile.pool import PoolRefill
from atoll.reconcile.recovery import Recovery
from atoll.reconcile.requests import RequestSweep
from atoll.reconcile.sessions import SessionReconciler
from atoll.reconcile.templates import TemplateNews
from atoll.reconcile.webhooks import WebhookLoop
from atoll.service.activity import Activity
from atoll.service.admission import Admission
from atoll.service.approvals import Approvals
from atoll.service.artifacts import Artifacts
from atoll.service.attempts import Attempts
from atoll.service.builds import Builds
from atoll.service.bulk import Bulk
from atoll.service.checkpoints import Checkpoints
from atoll.service.clones import Clones
from atoll.service.consoles import Consoles
from atoll.service.contexts import Contexts
from atoll.service.deliveries import Sender
from atoll.service.dependencies import Dependencies
from atoll.service.ends import Ends
from atoll.service.events import Feed
from atoll.service.executions import Executions
from atoll.service.files import Files
from atoll.service.hops import LIFETIME, Hops
from atoll.service.invocations import Invocations
from atoll.service.kept import KeptFiles
from atoll.service.keys import Keys
from atoll.service.leases import Leases
from atoll.service.lives import Lives
from atoll.service.materials import Materials
from atoll.service.moves import Moves
from atoll.service.nodes import Nodes
from atoll.service.nonces import Nonces
from atoll.service.packages import Packages
from atoll.service.peers import Peers
from atoll.service.placement import Placements
from atoll.service.pool import Pool
from atoll.service.probing import Probing
from atoll.service.provision import Provision
from atoll.service.reports import Reports
from atoll.service.runs import LEAVING, Runs
from atoll.service.saves import Saves
from atoll.service.sealing import Sealing
from atoll.service.secrets import Secrets, SessionSecrets
from atoll.service.sessions import Sessions, settle_topic
from atoll.service.signed_links import SignedLinks
from atoll.service.signing import Signing
from atoll.service.steps import Steps
from atoll.service.tasks import Tasks
from atoll.service.templates import Templates
from atoll.service.tokens import Tokens
from atoll.service.volumes import Volumes
from atoll.service.wants import Wants
from atoll.service.webhooks import Webhooks
from atoll.settings import Settings
from atoll.stores.recall import RecallingStore
from atoll.stores.sql.dsn import Kind
from atoll.stores.sql.store import SqlStore
from atoll.stores.sql.upgrades import Schema

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from starlette.types import ASGIApp

    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.drivers.base import Driver
    from atoll.drivers.local.host import Check
    from atoll.settings import BlobSettings
    from atoll.stores.base import Store

DATABASE = "atoll.db"
KEY_FILE = "key"
SECRET_KEY_FILE = "secret-key"  # noqa: S105 - the name of a file
TOKEN_BEYOND_SESSION = timedelta(days=7)
"""How long an instance may have waited in a pool and still report all its session's life."""
ENVIRONMENT = "environment"
"""Name of the key that comes from ATOLL_API_KEY."""

log = structlog.get_logger(__name__)


def database_urls(settings: Settings) -> tuple[str, ...]:
    return settings.database_urls or (
        settings.database_url or f"sqlite:///{settings.data_dir / DATABASE}",
    )


def _names_database(settings: Settings) -> bool:
    return settings.database_url is not None or bool(settings.database_urls)


def open_store(settings: Settings) -> SqlStore:
    return SqlStore(database_urls(settings), sqlite=settings.sqlite, database=settings.database)


def open_coordination(settings: Settings, cluster: str, clock: Clock) -> Coordination:
    """What the replicas of one database agree by, and those of no other."""
    replica, ttl = ids.replica_id(), settings.execution.max_timeout
    if settings.redis_url is not None:
        # Only here: a server without Redis does not need to load its client.
        from atoll.coordination.redis import RedisCoordination

        own = {"prefix": f"{settings.coordination.prefix}.{cluster}"}
        given = settings.coordination.model_copy(update=own)
        return RedisCoordination(replica, settings.redis_url, given, ttl)
    return MemoryCoordination(replica, settings.coordination, ttl, clock)


class Application:
    """The parts, as the server needs to reach them."""

    def __init__(self, web: ASGIApp, sessions: Sessions, keys: Keys, feed: Feed) -> None:
        self.web = web
        self.sessions = sessions
        self.keys = keys
        self.feed = feed


@asynccontextmanager
async def application(
    settings: Settings, *, embedded: bool = False, url: str | None = None
) -> AsyncIterator[Application]:
    """
    A whole Atoll on `settings.data_dir`, at `url` for the control planes of other nodes. Embedded,
    it needs no key, and its instances end with it.
    """
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(make_data_dir, settings.data_dir)
        lock = None
        if not embedded:
            shared = settings.redis_url is not None
            lock = await asyncio.to_thread(DataDirLock, settings.data_dir, shared=shared)
            stack.callback(lock.close)
        presence = await asyncio.to_thread(
            known_nodes.Presence, settings.data_dir, temporary=embedded
        )
        stack.callback(presence.close)
        await asyncio.to_thread(mimetypes.init)
        clock = SystemClock()
        tasks = Tasks()
        store = RecallingStore(open_store(settings), clock, settings.recall)
        stack.push_async_callback(store.close)
        await store.open()
        own = embedded or not _names_database(settings)
        cluster = await store.cluster()
        if not embedded:
            await asyncio.to_thread(give_to, settings.data_dir, cluster, own=own)
        node_id = await asyncio.to_thread(directories.node_id, settings.data_dir, own=own)
        blobs = choose(settings, clock)
        spool = blobs if isinstance(blobs, Spool) else None
        bulk = Bulk(blobs, settings.blob)
        coordination = open_coordination(settings, cluster, clock)
        stack.push_async_callback(coordination.close)
        await coordination.open()
        stack.push_async_callback(_leave, coordination)
        leases = Leases(coordination, clock, settings.coordination)
        await leases.start()
        stack.push_async_callback(_stop, [asyncio.create_task(leases.run(), name="heartbeat")])
        driver = open_driver(settings)
        stack.push_async_callback(driver.close)
        await driver.open()
        feed = Feed(store, coordination, clock)
        store.told = feed.written
        sealing = _sealing(settings, own=own)
        materials = Materials(blobs, sealing)
        templates = Templates(store, driver, materials, coordination, clock, settings)
        templates.told = feed.written
        await templates.ensure_default()
        tokens = None if embedded else await _tokens(store, clock, settings)
        pool = Pool(
            store,
            driver,
            clock,
            node_id,
            leases.replica,
            ephemeral=embedded,
            settings=settings.pool,
            callback=None if tokens is None else _callbacks(tokens, settings),
        )
        packages = Packages(driver, leases, clock, settings.packages, await store.secret(), node_id)
        builds = Builds(
            store,
            driver,
            templates,
            packages,
            materials,
            leases,
            tasks,
            blobs,
            clock,
            settings.template,
            node_id,
        )
        pool.provide = builds.provide
        build_loop = BuildLoop(store, builds, leases, clock, settings.template)

        checkpoints = Checkpoints(
            store, blobs, leases, clock, node_id, backups=settings.workspace.backups
        )
        lives = Lives(
            store,
            driver,
            pool,
            templates,
            leases,
            tasks,
            clock,
            settings.session,
            node_id,
            checkpoints,
        )
        sealed = Secrets(sealing)
        sender = Sender(sealing, clock, settings.event)
        volumes = Volumes(store, driver, blobs, clock, settings.session, node_id)
        provision = Provision(sealed, volumes, packages)
        sessions = Sessions(
            store,
            driver,
            pool,
            templates,
            lives,
            leases,
            tasks,
            clock,
            settings,
            node_id,
            provision,
        )
        steps = Steps(
            store,
            driver,
            pool,
            lives,
            sessions,
            checkpoints,
            leases,
            clock,
            settings.session,
            settings.archive,
            node_id,
            remote=spool is not None,
        )
        wants = Wants(store, driver, templates, lives, sessions, tasks, clock, settings, node_id)
        sessions.settle = steps.settle
        sessions.wake = functools.partial(_wake, coordination)
        activity = Activity(store, tasks, clock)
        lives.touched = activity.touch
        activity.moved = wants.schedule
        dependencies = Dependencies(
            store, sessions, lives, templates, provision, packages, leases, tasks, clock, node_id
        )
        ends = Ends(store, bulk, coordination, clock)
        attempts = Attempts(
            store, driver, lives, bulk, leases, provision, clock, settings.execution, settings.link
        )
        approvals = Approvals(coordination, lives, tasks)
        runs = Runs(
            store,
            sessions,
            lives,
            bulk,
            attempts,
            ends,
            coordination,
            leases,
            approvals,
            tasks,
            clock,
            settings.execution,
            node_id,
        )
        saves = Saves(
            checkpoints,
            store,
            driver,
            lives,
            tasks,
            clock,
            settings.workspace,
            remote=spool is not None,
            away=lambda: None if spool is None else spool.away,
            embedded=embedded,
        )
        sessions.saves = saves
        saves.resting = steps.save_resting
        checkpoints.discard_mounted = volumes.discard_mounted
        saves.busy = runs.sessions
        runs.saved = saves.before_result
        keys = Keys(store, clock, settings.recall)
        nodes = Nodes(
            store,
            driver,
            builds,
            coordination,
            clock,
            settings,
            node_id,
            url or f"unix://{settings.data_dir / NODE}",
            pool.on_node,
        )
        placements = Placements(store, templates, clock, settings.node, node_id, pool.sizes)
        moves = Moves(store, placements, coordination, clock)
        admission = Admission(store, clock, settings.node, node_id)
        sessions.admit, lives.admit = admission.admit, admission.readmit
        nonces = settings.data_dir / NODE / "nonces"
        peers = Peers(
            store,
            lives,
            moves,
            coordination,
            clock,
            settings.node,
            node_id,
            Hops(await store.secret(), node_id, clock, Nonces(nonces, LIFETIME)),
            shared_blobs=settings.blob.url is not None,
        )
        stack.push_async_callback(peers.close)
        saves.elsewhere = peers.save
        departed = Departed(store, driver, lives, runs, node_id)
        report = Report(nodes, departed, coordination, clock, settings.node, pool.sizes)

        def changed() -> None:
            pool.renew()
            build_loop.changed.set()
            report.changed.set()

        templates.changed = changed
        contexts = Contexts(lives, driver, provision, settings.execution)
        executions = Executions(
            store,
            lives,
            runs,
            ends,
            bulk,
            coordination,
            leases,
            approvals,
            contexts,
            tasks,
            clock,
            settings,
        )
        files = Files(
            lives,
            driver,
            work_timeout=settings.link.work_timeout,
            kept=KeptFiles(checkpoints, saves.left),
        )
        files.changed = saves.touched
        found = Services(
            sessions=sessions,
            wants=wants,
            clones=Clones(
                store, driver, lives, sessions, wants, saves, sealed, leases, clock, node_id
            ),
            dependencies=dependencies,
            executions=executions,
            consoles=Consoles(executions, lives, coordination, settings),
            contexts=contexts,
            invocations=Invocations(store, executions),
            files=files,
            links=SignedLinks(
                files,
                lives,
                Signing(await store.secret(), clock),
                blobs,
                None if embedded else keys,
            ),
            artifacts=Artifacts(store, lives),
            checkpoints=checkpoints,
            saves=saves,
            templates=templates,
            materials=materials,
            builds=builds,
            volumes=volumes,
            secrets=SessionSecrets(store, lives, sealed, clock),
            nodes=nodes,
            placements=placements,
            peers=peers,
            feed=feed,
            webhooks=Webhooks(store, feed, sender, sealing, coordination, clock, settings.event),
            pool=pool,
            store=store,
            blobs=blobs,
            coordination=coordination,
            clock=clock,
            settings=settings,
            streams=OpenStreams(settings.connection.max_streams),
            answer_memory=AnswerMemory(settings.connection.answer_memory),
        )
        registry = CollectorRegistry()
        metrics.register(registry, sessions, lives, runs, pool, spool, nodes, moves)
        if spool is not None and embedded:
            stack.push_async_callback(_last_catch_up, spool, settings.shutdown_timeout)
        stack.push_async_callback(lives.close)
        stack.push_async_callback(wants.close)
        stack.push_async_callback(pool.close)
        stack.callback(saves.close)
        stack.callback(activity.close)
        stack.push_async_callback(tasks.settle, settings.shutdown_timeout.total_seconds())
        adoption = Adoption(store, coordination, leases, runs, clock, settings.coordination)
        running: list[asyncio.Task[None]] = []
        if embedded:
            # Concurrently: instances end independently of each other.
            stack.push_async_callback(_stop, running, sessions.stop_all, pool.close)
        else:
            stack.callback(runs.let_go)
            stack.push_async_callback(_stop, running)
        if lock is not None and lock.alone:
            await Recovery(store, driver, sessions, pool, settings.pool, node_id).run()
            await asyncio.to_thread(lock.let_others_in)
        await nodes.report()
        await adoption.once()
        orphans = Orphans(
            store,
            driver,
            sessions,
            pool,
            coordination,
            leases,
            clock,
            settings.session,
            node_id,
            cluster,
        )
        await peers.look()
        loops = {
            "adoption": adoption.run(),
            "templates": TemplateNews(coordination, templates).run(),
            "pool refill": PoolRefill(pool, store, driver, settings.pool, clock).run(),
            "sessions": SessionReconciler(
                store, wants, steps, coordination, clock, settings.session, node_id
            ).run(),
            "orphans": orphans.run(),
            "builds": build_loop.run(),
            "layers": LayerSweep(
                store, driver, builds, leases, clock, settings.template, node_id
            ).run(),
            "packages": PackageSweep(
                store, driver.environments, leases, clock, settings.packages, node_id
            ).run(),
            "request sweep": RequestSweep(store, blobs, clock).run(),
            "checkpoint sweep": CheckpointSweep(store, checkpoints, clock).run(),
            "orphaned blobs": OrphanSweep(
                store,
                blobs,
                checkpoints,
                leases,
                clock,
                cluster=cluster,
                name=node_id if spool is None else "shared",
                grace=settings.blob.orphan_grace,
                request_ttl=settings.idempotency_ttl,
            ).run(),
            "saves": saves.run(),
            "peers": peers.run(),
            "report": report.run(),
            "event numbers": Sequencer(feed).run(),
            "event news": EventNews(coordination, feed).run(),
            "event sweep": EventSweep(store, clock, settings.event).run(),
            "webhooks": WebhookLoop(
                store, feed, sender, coordination, leases, clock, settings.event
            ).run(),
        }
        probing = Probing(
            await store.secret(), clock, settings.node.probe_timeout, settings.node.ca_file
        )
        if not embedded:
            loops["attendance"] = Attendance(store, lives, leases, settings.link, node_id).run()
            loops["leftovers"] = _collect_leftovers(settings)
            loops["probe"] = Probe(
                store, nodes, probing, moves, coordination, leases, clock, settings.node
            ).run()
            loops["drains"] = Drains(
                store,
                nodes,
                placements,
                moves,
                runs,
                coordination,
                leases,
                settings.node,
                steps.leave,
            ).run()
        if spool is not None:
            loops["spool"] = spool.run()
        running += [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
        web = build(found, None if embedded else keys, registry)
        if tokens is not None:
            reports = Reports(store, bulk, ends, clock, settings.execution, node_id)
            web = Internal(web, reports, tokens, settings.execution)
        if not embedded:
            web = Pacing(NodeRoute(web, nodes, probing), found.answer_memory)
        yield Application(web, sessions, keys, feed)


def _bucket(settings: BlobSettings) -> Bucket | None:
    """The bucket as the node mounts it; none when blobs are on its disk."""
    if settings.url is None:
        return None
    name, prefix = settings.place
    region = settings.region or os.environ.get("AWS_REGION") or "us-east-1"
    path_style = settings.path_style
    given = {
        field: None if secret is None else secret.get_secret_value()
        for field, secret in (
            ("access_key_id", settings.access_key_id),
            ("secret_access_key", settings.secret_access_key),
            ("proxy_url", settings.proxy_url),
        )
    }
    return Bucket(
        name=name,
        prefix=prefix,
        endpoint=settings.endpoint or f"https://s3.{region}.amazonaws.com",
        path_style=settings.endpoint is not None if path_style is None else path_style,
        connect_timeout=settings.connect_timeout,
        timeout=settings.timeout,
        region=region,
        encryption=settings.encryption,
        kms_key_id=settings.kms_key_id,
        ca_file=settings.ca_file,
        **given,
    )


def _sealing(settings: Settings, *, own: bool) -> Sealing:
    """A key file is only for a database that is beside it: others share one and not the file."""
    keys = [settings.secrets.key, *settings.secrets.old_keys]
    given = [key.get_secret_value() for key in keys if key is not None]
    return Sealing(given, settings.data_dir / SECRET_KEY_FILE if own else None)


async def _last_catch_up(spool: Spool, limit: timedelta) -> None:
    """Move what still waits: the directory that it waits in is about to go."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit.total_seconds()):
            if await spool.catch_up():
                return
    log.error("spool.lost", objects=spool.waiting.objects, size=spool.waiting.size)


def open_driver(settings: Settings) -> Driver:
    """The driver that the settings name, which is still to be opened."""
    bucket = _bucket(settings.blob)
    if settings.driver == "docker":
        # Its client takes time to import, which others need not spend.
        from atoll.drivers.docker.driver import DockerDriver

        return DockerDriver(
            settings.data_dir, settings.docker, settings.link, settings.local, bucket
        )
    return LocalDriver(
        settings.data_dir, settings.local, settings.link, bucket, packages=settings.packages
    )


async def _tokens(store: Store, clock: Clock, settings: Settings) -> Tokens | None:
    """None where executors are not to report."""
    if settings.link.callback_url is None:
        return None
    life = settings.session.max_timeout + TOKEN_BEYOND_SESSION
    return Tokens(await store.secret(), clock, life)


def _callbacks(tokens: Tokens, settings: Settings) -> Callable[[str], Callback]:
    url = settings.link.callback_url
    assert url is not None
    return lambda instance_id: Callback(url, tokens.make(instance_id))


async def _wake(coordination: Coordination, node_id: str) -> None:
    try:
        await coordination.tell(settle_topic(node_id))
    except TemporaryError as error:
        # Its sweep finds them.
        log.info("node.not_woken", node_id=node_id, error=error.message)


async def _leave(coordination: Coordination) -> None:
    """Tell the others that this replica ends, so that they take over what it had at once."""
    await coordination.shutdown()
    try:
        await coordination.tell(LEAVING)
    except TemporaryError as error:
        log.info("replica.left_unheard", error=error.message)


async def _collect_leftovers(settings: Settings) -> None:
    try:
        found = await leftovers.collect(settings)
    except OSError as error:
        log.warning("leftovers.not_collected", error=str(error))
        return
    for one in found:
        if one.error is not None:
            log.warning("leftovers.stay", data_dir=str(one.data_dir), error=one.error)


async def _stop(loops: list[asyncio.Task[None]], *ends: Callable[[], Awaitable[None]]) -> None:
    """Cancel the loops, and call `ends` while they finish."""
    for loop in loops:
        loop.cancel()
    waited = [*loops, *(end() for end in ends)]
    for result in await asyncio.gather(*waited, return_exceptions=True):
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
    with await asyncio.to_thread(own_directory, base, settings.local) as place:
        try:
            async with application(
                settings.model_copy(update={"data_dir": place}), embedded=True
            ) as app:
                yield app.web
        finally:
            await asyncio.to_thread(remove, place)


# Local commands


def doctor(settings: Settings) -> list[Check]:
    return host.checks(settings.local, settings.data_dir / NODE)


def advice(settings: Settings, checks: list[Check]) -> tuple[str, list[tuple[str, str]]]:
    """What an ordinary user lacks, as a paragraph, and the ways to get it."""
    return without_root(checks, *delegation.possible(settings.local))


@asynccontextmanager
async def keys(settings: Settings) -> AsyncIterator[Keys]:
    """The keys of a data directory, for its owner."""
    await asyncio.to_thread(make_data_dir, settings.data_dir)
    store = open_store(settings)
    await store.open()
    try:
        yield Keys(store, SystemClock(), settings.recall)
    finally:
        await store.close()


@asynccontextmanager
async def schema(settings: Settings, *, alone: bool = False) -> AsyncIterator[Schema]:
    """The schema of the database; `alone` refuses while a server uses the data directory."""
    found = Schema(database_urls(settings), sqlite=settings.sqlite, database=settings.database)
    if found.kind is not Kind.SQLITE:
        yield found
        return
    await asyncio.to_thread(make_data_dir, settings.data_dir)
    if not alone:
        yield found
        return
    lock = await asyncio.to_thread(DataDirLock, settings.data_dir, shared=False)
    with contextlib.closing(lock):
        yield found


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
    workers.check(settings)
    # Secrets pass through its memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    raise_open_files()
    configure_logging(settings.log_level, as_json=settings.log_json)
    if settings.driver == "local":
        # Before there are workers, which inherit the group.
        delegation.acquire(settings.local, settings.data_dir / NODE)
    with server.listen(settings.host, settings.port) as listener:
        port = listener.getsockname()[1]

        def welcome() -> None:
            key_file = None if settings.api_key else settings.data_dir / KEY_FILE
            server.print_welcome(settings, port, key_file)

        def work(ready: workers.Ready) -> None:
            # Each of them: who ends last ends what the others still made.
            server.run(_serve(settings, listener, ready, ready.parent, stop_sessions))

        if settings.workers == 1:
            server.run(_serve(settings, listener, welcome, None, stop_sessions))
        elif code := workers.Workers(settings, work).run(welcome):
            raise SystemExit(code)
    if not stop_sessions:
        count = asyncio.run(_left_running(settings))
        server.print_farewell(settings, count)


async def _left_running(settings: Settings) -> int:
    """How many sessions of this node have an instance; 0 when the database does not say."""
    own = not _names_database(settings)
    node_id = directories.node_id(settings.data_dir, own=own)
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
    """End all sessions of a data directory that no server has; how many had an instance."""
    if not settings.data_dir.is_dir():
        raise NotFound(f"There is no directory {settings.data_dir}.", code="data_dir_not_found")
    count = await _left_running(settings)
    async with application(settings) as found:
        await found.sessions.stop_all()
    return count


async def _serve(
    settings: Settings,
    listener: socket.socket,
    ready: Callable[[], None],
    parent: int | None,
    stop_sessions: bool,
) -> None:
    url = server.address(settings, listener.getsockname()[1])
    async with application(settings, url=url) as app:
        await ensure_first_key(settings, app.keys)
        # Before the welcome: who reads it may want it to end at once.
        http = server.prepare(app.web, settings, parent, app.feed.close)
        ready()
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
