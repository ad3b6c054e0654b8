"""
The services of a replica on its back-ends, and the web application in front of them.

The groups of services are built by `compute.py`, `sessions.py`, `executions.py` and `nodes.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from atoll.api.rest.app import build
from atoll.api.rest.lazy_routes import LazyRoutes
from atoll.api.rest.metrics_sources import MetricsSources
from atoll.api.rest.middleware.backpressure import Backpressure
from atoll.api.rest.middleware.client_limits import ResponseMemory, StreamLimit
from atoll.api.rest.services import Services
from atoll.app.compute import compute_group
from atoll.app.executions import execution_group
from atoll.app.loops import Loops, ReplicaServices
from atoll.app.nodes import node_group
from atoll.app.sessions import session_core, session_group
from atoll.reconcile.recovery import Recovery
from atoll.service.auth.service import ApiKeys
from atoll.service.executions.artifacts import Artifacts
from atoll.service.files.checkpoint_files import CheckpointFiles
from atoll.service.files.grants import GrantTokens
from atoll.service.files.service import Files
from atoll.service.files.signed_urls import SignedUrls
from atoll.service.webhooks.delivery import WebhookSender
from atoll.service.webhooks.service import Webhooks

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import timedelta

    from starlette.types import ASGIApp

    from atoll.app.backends import Backends
    from atoll.app.data_directory import DataDirLock
    from atoll.blobs.spool import Spool
    from atoll.service.events.service import Feed
    from atoll.service.sessions.service import Sessions
    from atoll.settings import Settings

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Application:
    """What the server needs of a running replica."""

    web: ASGIApp
    documented: LazyRoutes
    sessions: Sessions
    keys: ApiKeys
    feed: Feed


async def start_replica(
    backends: Backends, stack: AsyncExitStack, lock: DataDirLock | None, url: str | None
) -> Application:
    """Returns when it can serve; `stack` ends it."""
    groups = await _groups(backends, url)
    stack.push_async_callback(groups.nodes.peers.close)
    keys = ApiKeys(backends.replica.store, backends.replica.clock, backends.settings.recall)
    services = _services(groups, keys)
    running: list[asyncio.Task[None]] = []
    _close_at_exit(groups, stack, running)
    loops = Loops(groups)
    if lock is not None and lock.alone:
        if _is_alone_on_node(backends.settings):
            await _recover(groups)
        await asyncio.to_thread(lock.let_others_in)
    await groups.nodes.nodes.report()
    await loops.adoption.once()
    await groups.nodes.peers.refresh()
    running += [asyncio.create_task(loop, name=name) for name, loop in loops.all().items()]
    documented = _documented_routes(groups, services)
    web = _web(groups, documented, services, None if backends.embedded else keys)
    return Application(web, documented, groups.sessions.service, keys, groups.compute.feed)


async def _groups(backends: Backends, url: str | None) -> ReplicaServices:
    compute = compute_group(backends)
    await compute.templates.ensure_default()
    core = session_core(backends, compute)
    nodes = node_group(backends, compute, core, url=url)
    sessions = session_group(backends, compute, core, nodes.remote_checkpoints)
    executions = execution_group(backends, sessions)
    settings, replica = backends.settings, backends.replica
    sender = WebhookSender(backends.encryption, replica.clock, settings.event)
    return ReplicaServices(backends, compute, nodes, sessions, executions, sender)


def _services(groups: ReplicaServices, keys: ApiKeys) -> Services:
    backends, compute, sessions = groups.backends, groups.compute, groups.sessions
    settings, replica, executions = backends.settings, backends.replica, groups.executions
    files = Files(
        sessions.access,
        backends.driver,
        checkpoint_files=CheckpointFiles(
            compute.checkpoints, sessions.autosave.wait_for_last_checkpoint
        ),
    )
    files.subscribe(sessions.autosave)
    return Services(
        sessions=sessions.service,
        dependencies=sessions.dependencies,
        executions=executions.service,
        consoles=executions.consoles,
        contexts=executions.contexts,
        invocations=executions.invocations,
        files=files,
        signed_urls=SignedUrls(
            files,
            sessions.access,
            GrantTokens(backends.secret, replica.clock),
            backends.blobs,
            None if backends.embedded else keys,
        ),
        artifacts=Artifacts(replica.store, sessions.access),
        checkpoints=compute.checkpoints,
        checkpoint_requests=sessions.checkpoint_requests,
        templates=compute.templates,
        build_inputs=compute.build_inputs,
        builds=compute.builds,
        volumes=compute.volumes,
        secrets=sessions.secrets,
        nodes=groups.nodes.nodes,
        placements=groups.nodes.placement,
        peers=groups.nodes.peers,
        locations=groups.nodes.locations,
        feed=compute.feed,
        webhooks=Webhooks(
            replica, compute.feed, groups.webhook_sender, backends.encryption, settings.event
        ),
        pool=compute.pool,
        store=replica.store,
        blobs=backends.blobs,
        coordination=replica.coordination,
        clock=replica.clock,
        settings=settings,
        streams=StreamLimit(settings.connection.max_streams),
        response_memory=ResponseMemory(settings.connection.answer_memory),
    )


def _documented_routes(groups: ReplicaServices, services: Services) -> LazyRoutes:
    metrics = MetricsSources(
        sessions=groups.sessions.service,
        connections=groups.sessions.access.connections,
        runner=groups.executions.runner,
        commit=groups.executions.commit,
        pool=groups.compute.pool,
        spool=groups.backends.spool,
        nodes=groups.nodes.nodes,
        migrations=groups.nodes.migrations,
    )
    return LazyRoutes(services, metrics)


def _web(
    groups: ReplicaServices, documented: LazyRoutes, services: Services, keys: ApiKeys | None
) -> ASGIApp:
    """The web application; without keys, an embedded one that serves this process alone."""
    web = build(documented, services, keys)
    tokens = groups.compute.tokens
    if tokens is not None:
        from atoll.api.internal.executor_callbacks import ExecutorCallbackRoutes

        callbacks, settings = groups.executions.callbacks, groups.backends.settings
        web = ExecutorCallbackRoutes(web, callbacks, tokens, settings.execution)
    if keys is not None:
        from atoll.api.internal.node_probe import NodeProbeRoute

        probed = NodeProbeRoute(web, groups.nodes.nodes, groups.nodes.probe)
        web = Backpressure(probed, services.response_memory)
    return web


def _close_at_exit(
    groups: ReplicaServices, stack: AsyncExitStack, running: list[asyncio.Task[None]]
) -> None:
    """Register what ends the services, in reverse order; `running` are the loops."""
    settings, spool = groups.backends.settings, groups.backends.spool
    pool, sessions = groups.compute.pool, groups.sessions
    timeout = settings.shutdown_timeout
    if spool is not None and groups.backends.embedded:
        stack.push_async_callback(_upload_spool, spool, timeout)
    stack.push_async_callback(sessions.access.connections.close)
    stack.push_async_callback(pool.close)
    stack.callback(sessions.close)
    stack.push_async_callback(groups.backends.replica.background.settle, timeout.total_seconds())
    if groups.backends.embedded:
        # At the same time: instances end independently of each other.
        stack.push_async_callback(_stop, running, sessions.service.end_all, pool.close)
    else:
        stack.callback(groups.executions.runner.detach)
        stack.push_async_callback(_stop, running)


def _is_alone_on_node(settings: Settings) -> bool:
    """
    Whether a replica that is alone in its data directory is alone on its node. A cluster is shared
    by all replicas, of which there is one without Redis.
    """
    return settings.driver != "kubernetes" or settings.redis_url is None


async def _recover(groups: ReplicaServices) -> None:
    await Recovery(
        groups.backends.replica,
        groups.backends.driver,
        groups.sessions.timers,
        groups.compute.pool,
        groups.backends.settings.pool,
    ).run()


async def _upload_spool(spool: Spool, limit: timedelta) -> None:
    """Upload what waits for the blob store: the spool's directory is about to be removed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit.total_seconds()):
            if await spool.catch_up():
                return
    log.error("spool.lost", objects=spool.usage.objects, size=spool.usage.size)


async def _stop(loops: list[asyncio.Task[None]], *ends: Callable[[], Awaitable[None]]) -> None:
    """Cancel the loops, and call `ends` while they finish."""
    for loop in loops:
        loop.cancel()
    waited = [*loops, *(end() for end in ends)]
    for result in await asyncio.gather(*waited, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
