"""
The composition root: the only module that names concrete back-ends.

`application` puts the parts together and takes them apart again, whatever happens in between; a
server, an embedded Atoll and the local commands all go through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import mimetypes
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry

from atoll.api.internal.executor_callbacks import ExecutorCallbackRoutes
from atoll.api.internal.node_probe import NodeProbeRoute
from atoll.api.rest import prometheus
from atoll.api.rest.app import build
from atoll.api.rest.middleware.backpressure import Backpressure
from atoll.api.rest.middleware.client_limits import ResponseMemory, StreamLimit
from atoll.api.rest.services import Services
from atoll.app import data_directory, leftovers
from atoll.app.coordination import announce_departure, open_coordination, wake_node
from atoll.app.data_directory import DataDirLock, give_to, make_data_dir
from atoll.app.drivers import open_driver
from atoll.app.stores import names_database, open_store
from atoll.blobs.choice import choose
from atoll.blobs.spool import Spool
from atoll.clock import SystemClock
from atoll.coordination.leases import Leases
from atoll.drivers.local.driver import NODE
from atoll.drivers.shared import data_directories
from atoll.model.instance import Callback
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
from atoll.service.auth.encryption import Encryption
from atoll.service.auth.executor_tokens import ExecutorTokens
from atoll.service.auth.service import ApiKeys
from atoll.service.background import BackgroundTasks
from atoll.service.checkpoints.service import Checkpoints
from atoll.service.contexts.service import Contexts
from atoll.service.events.service import Feed
from atoll.service.executions.approvals import Approvals
from atoll.service.executions.artifacts import Artifacts
from atoll.service.executions.attempt import Attempts
from atoll.service.executions.callbacks import ExecutorCallbacks
from atoll.service.executions.completion import Completions
from atoll.service.executions.console import Consoles
from atoll.service.executions.offload import Offload
from atoll.service.executions.runner import Runner
from atoll.service.executions.service import Executions
from atoll.service.files.checkpoint_files import CheckpointFiles
from atoll.service.files.grants import GrantTokens
from atoll.service.files.service import Files
from atoll.service.files.signed_urls import SignedUrls
from atoll.service.invocations.service import Invocations
from atoll.service.nodes.forward_token import MAX_CLOCK_SKEW, ForwardTokens
from atoll.service.nodes.locations import SessionLocations
from atoll.service.nodes.migration import Migrations
from atoll.service.nodes.peers import Peers
from atoll.service.nodes.probe import NodeProbe
from atoll.service.nodes.remote_checkpoints import RemoteCheckpoints
from atoll.service.nodes.replay_guard import ReplayGuard
from atoll.service.nodes.service import Nodes
from atoll.service.packages.service import Packages
from atoll.service.placement.admission import Admission
from atoll.service.placement.service import Placement
from atoll.service.pool.service import Pool
from atoll.service.replica import Replica
from atoll.service.sessions.activity import Activity
from atoll.service.sessions.autosave import Autosave
from atoll.service.sessions.clone import Clones
from atoll.service.sessions.connections import Connections
from atoll.service.sessions.dependencies import Dependencies
from atoll.service.sessions.lifecycle import Lifecycle
from atoll.service.sessions.provisioning import Provisioning
from atoll.service.sessions.secrets import Secrets, SessionSecrets
from atoll.service.sessions.service import Sessions
from atoll.service.sessions.transitions import Transitions
from atoll.service.templates.build_inputs import BuildInputs
from atoll.service.templates.build_logs import BuildLogs
from atoll.service.templates.builds import Builds
from atoll.service.templates.service import Templates
from atoll.service.volumes.service import Volumes
from atoll.service.webhooks.delivery import WebhookSender
from atoll.service.webhooks.service import Webhooks
from atoll.stores.recall import RecallingStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from starlette.types import ASGIApp

    from atoll.clock import Clock
    from atoll.settings import Settings
    from atoll.stores.base import Store

SECRET_KEY_FILE = "secret-key"  # noqa: S105 - the name of a file
TOKEN_BEYOND_SESSION = timedelta(days=7)
"""How long an instance may have waited in a pool and still report all its session's life."""

log = structlog.get_logger(__name__)


class Application:
    """The parts, as the server needs to reach them."""

    def __init__(self, web: ASGIApp, sessions: Sessions, keys: ApiKeys, feed: Feed) -> None:
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
            data_directories.Presence, settings.data_dir, temporary=embedded
        )
        stack.callback(presence.close)
        await asyncio.to_thread(mimetypes.init)
        clock = SystemClock()
        background = BackgroundTasks()
        store = RecallingStore(open_store(settings), clock, settings.recall)
        stack.push_async_callback(store.close)
        await store.open()
        own = embedded or not names_database(settings)
        cluster = await store.cluster()
        if not embedded:
            await asyncio.to_thread(give_to, settings.data_dir, cluster, own=own)
        node_id = await asyncio.to_thread(data_directory.node_id, settings.data_dir, own=own)
        blobs = choose(settings, clock)
        spool = blobs if isinstance(blobs, Spool) else None
        offload = Offload(blobs)
        coordination = open_coordination(settings, cluster, clock)
        stack.push_async_callback(coordination.close)
        await coordination.open()
        stack.push_async_callback(announce_departure, coordination)
        leases = Leases(coordination, clock, settings.coordination)
        await leases.start()
        stack.push_async_callback(_stop, [asyncio.create_task(leases.run(), name="heartbeat")])
        driver = open_driver(settings)
        stack.push_async_callback(driver.close)
        await driver.open()
        feed = Feed(store, coordination, clock)
        store.told = feed.written
        encryption = _encryption(settings, own=own)
        replica = Replica(node_id, store, coordination, leases, background, clock)
        build_inputs = BuildInputs(blobs, encryption)
        templates = Templates(replica, driver, build_inputs, BuildLogs(blobs), feed, settings)
        await templates.ensure_default()
        packages = Packages(driver, leases, clock, settings.packages, await store.secret(), node_id)
        builds = Builds(replica, driver, templates, packages, settings.template)
        tokens = None if embedded else await _tokens(store, clock, settings)
        pool = Pool(
            replica,
            driver,
            builds,
            ephemeral=embedded,
            callback=None if tokens is None else _callbacks(tokens, settings),
        )
        build_loop = BuildLoop(store, builds, leases, clock, settings.template)
        volumes = Volumes(store, driver, blobs, clock, settings.session, node_id)
        checkpoints = Checkpoints(replica, blobs, volumes, backups=settings.workspace.backups)
        connections = Connections(
            store,
            driver,
            pool,
            templates,
            leases,
            background,
            clock,
            settings.session,
            node_id,
            checkpoints,
        )
        sealed = Secrets(encryption)
        sender = WebhookSender(encryption, clock, settings.event)
        provisioning = Provisioning(sealed, volumes, packages)
        sessions = Sessions(
            store,
            driver,
            pool,
            templates,
            connections,
            leases,
            background,
            clock,
            settings,
            node_id,
            provisioning,
        )
        transitions = Transitions(
            store,
            driver,
            pool,
            connections,
            sessions,
            checkpoints,
            leases,
            clock,
            settings.session,
            settings.archive,
            node_id,
            remote=spool is not None,
        )
        lifecycle = Lifecycle(
            store, driver, templates, connections, sessions, background, clock, settings, node_id
        )
        sessions.settle = transitions.settle
        sessions.wake = functools.partial(wake_node, coordination)
        activity = Activity(store, background, clock)
        connections.touched = activity.touch
        activity.moved = lifecycle.schedule
        dependencies = Dependencies(
            store,
            sessions,
            connections,
            templates,
            provisioning,
            packages,
            leases,
            background,
            clock,
            node_id,
        )
        completions = Completions(store, offload, coordination, clock)
        attempts = Attempts(
            store,
            driver,
            connections,
            offload,
            leases,
            provisioning,
            clock,
            settings.execution,
            settings.link,
        )
        approvals = Approvals(coordination, connections, background)
        runner = Runner(
            store,
            sessions,
            connections,
            offload,
            attempts,
            completions,
            coordination,
            leases,
            approvals,
            background,
            clock,
            settings.execution,
            node_id,
        )
        autosave = Autosave(
            checkpoints,
            store,
            driver,
            connections,
            background,
            clock,
            settings.workspace,
            remote=spool is not None,
            away=lambda: None if spool is None else spool.away,
            embedded=embedded,
        )
        sessions.autosave = autosave
        autosave.resting = transitions.save_resting
        autosave.busy = runner.sessions
        runner.saved = autosave.before_result
        keys = ApiKeys(store, clock, settings.recall)
        own_url = url or f"unix://{settings.data_dir / NODE}"
        nodes = Nodes(replica, driver, builds, pool, settings, own_url)
        placements = Placement(store, templates, clock, settings.node, node_id, pool.sizes)
        migrations = Migrations(store, placements, coordination, clock)
        admission = Admission(store, clock, settings.node, node_id)
        sessions.admit, connections.admit = admission.admit, admission.readmit
        nonces = settings.data_dir / NODE / "nonces"
        forward_tokens = ForwardTokens(
            await store.secret(), node_id, clock, ReplayGuard(nonces, MAX_CLOCK_SKEW)
        )
        peers = Peers(replica, settings.node, forward_tokens)
        stack.push_async_callback(peers.close)
        autosave.elsewhere = RemoteCheckpoints(peers).save
        shared_blobs = settings.blob.url is not None
        locations = SessionLocations(
            replica, peers, connections, migrations, shared_blobs=shared_blobs
        )
        departed = Departed(store, driver, connections, runner, node_id)
        report = Report(nodes, departed, coordination, clock, settings.node, pool.sizes)

        for observer in (pool, build_loop, report):
            templates.subscribe(observer)
        contexts = Contexts(connections, driver, provisioning)
        executions = Executions(
            store,
            connections,
            runner,
            completions,
            offload,
            coordination,
            leases,
            approvals,
            contexts,
            background,
            clock,
            settings,
        )
        files = Files(
            connections,
            driver,
            checkpoint_files=CheckpointFiles(checkpoints, autosave.left),
        )
        files.subscribe(autosave)
        found = Services(
            sessions=sessions,
            lifecycle=lifecycle,
            clones=Clones(
                store,
                driver,
                connections,
                sessions,
                lifecycle,
                autosave,
                sealed,
                leases,
                clock,
                node_id,
            ),
            dependencies=dependencies,
            executions=executions,
            consoles=Consoles(executions, connections, coordination, settings),
            contexts=contexts,
            invocations=Invocations(store, executions),
            files=files,
            signed_urls=SignedUrls(
                files,
                connections,
                GrantTokens(await store.secret(), clock),
                blobs,
                None if embedded else keys,
            ),
            artifacts=Artifacts(store, connections),
            checkpoints=checkpoints,
            autosave=autosave,
            templates=templates,
            build_inputs=build_inputs,
            builds=builds,
            volumes=volumes,
            secrets=SessionSecrets(store, connections, sealed, clock),
            nodes=nodes,
            placements=placements,
            peers=peers,
            locations=locations,
            feed=feed,
            webhooks=Webhooks(replica, feed, sender, encryption, settings.event),
            pool=pool,
            store=store,
            blobs=blobs,
            coordination=coordination,
            clock=clock,
            settings=settings,
            streams=StreamLimit(settings.connection.max_streams),
            answer_memory=ResponseMemory(settings.connection.answer_memory),
        )
        registry = CollectorRegistry()
        prometheus.register(registry, sessions, connections, runner, pool, spool, nodes, migrations)
        if spool is not None and embedded:
            stack.push_async_callback(_last_catch_up, spool, settings.shutdown_timeout)
        stack.push_async_callback(connections.close)
        stack.push_async_callback(lifecycle.close)
        stack.push_async_callback(pool.close)
        stack.callback(autosave.close)
        stack.callback(activity.close)
        stack.push_async_callback(background.settle, settings.shutdown_timeout.total_seconds())
        adoption = Adoption(store, coordination, leases, runner, clock, settings.coordination)
        running: list[asyncio.Task[None]] = []
        if embedded:
            # Concurrently: instances end independently of each other.
            stack.push_async_callback(_stop, running, sessions.stop_all, pool.close)
        else:
            stack.callback(runner.let_go)
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
        await peers.refresh()
        loops = {
            "adoption": adoption.run(),
            "templates": TemplateNews(coordination, templates).run(),
            "pool refill": PoolRefill(pool, store, driver, settings.pool, clock).run(),
            "sessions": SessionReconciler(
                store, lifecycle, transitions, coordination, clock, settings.session, node_id
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
                request_ttl=settings.idempotency_ttl,
            ).run(),
            "saves": autosave.run(),
            "peers": peers.run(),
            "report": report.run(),
            "event numbers": Sequencer(feed).run(),
            "event news": EventNews(coordination, feed).run(),
            "event sweep": EventSweep(store, clock, settings.event).run(),
            "webhooks": WebhookLoop(
                store, feed, sender, coordination, leases, clock, settings.event
            ).run(),
        }
        probing = NodeProbe(
            await store.secret(), clock, settings.node.probe_timeout, settings.node.ca_file
        )
        if not embedded:
            loops["attendance"] = Attendance(
                store, connections, leases, settings.link, node_id
            ).run()
            loops["leftovers"] = _collect_leftovers(settings)
            loops["probe"] = Probe(
                store, nodes, probing, migrations, coordination, leases, clock, settings.node
            ).run()
            loops["drains"] = Drains(
                store,
                nodes,
                placements,
                migrations,
                runner,
                coordination,
                leases,
                settings.node,
                transitions.leave,
            ).run()
        if spool is not None:
            loops["spool"] = spool.run()
        running += [asyncio.create_task(loop, name=name) for name, loop in loops.items()]
        web = build(found, None if embedded else keys, registry)
        if tokens is not None:
            reports = ExecutorCallbacks(
                store, offload, completions, clock, settings.execution, node_id
            )
            web = ExecutorCallbackRoutes(web, reports, tokens, settings.execution)
        if not embedded:
            web = Backpressure(NodeProbeRoute(web, nodes, probing), found.answer_memory)
        yield Application(web, sessions, keys, feed)


def _encryption(settings: Settings, *, own: bool) -> Encryption:
    """A key file is only for a database that is beside it: others share one and not the file."""
    keys = [settings.secrets.key, *settings.secrets.old_keys]
    given = [key.get_secret_value() for key in keys if key is not None]
    return Encryption(given, settings.data_dir / SECRET_KEY_FILE if own else None)


async def _last_catch_up(spool: Spool, limit: timedelta) -> None:
    """Move what still waits: the directory that it waits in is about to go."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit.total_seconds()):
            if await spool.catch_up():
                return
    log.error("spool.lost", objects=spool.waiting.objects, size=spool.waiting.size)


async def _tokens(store: Store, clock: Clock, settings: Settings) -> ExecutorTokens | None:
    """None where executors are not to report."""
    if settings.link.callback_url is None:
        return None
    life = settings.session.max_timeout + TOKEN_BEYOND_SESSION
    return ExecutorTokens(await store.secret(), clock, life)


def _callbacks(tokens: ExecutorTokens, settings: Settings) -> Callable[[str], Callback]:
    url = settings.link.callback_url
    assert url is not None
    return lambda instance_id: Callback(url, tokens.make(instance_id))


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


# Local commands
