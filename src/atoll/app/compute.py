"""What instances are made of: templates, packages, the warm pool, checkpoints and volumes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from atoll.model.instance import Callback
from atoll.service.auth.executor_tokens import ExecutorTokens
from atoll.service.checkpoints.service import Checkpoints
from atoll.service.events.service import Feed
from atoll.service.instances import InstanceMaker
from atoll.service.packages.service import Packages
from atoll.service.placement.admission import Admission
from atoll.service.pool.service import Pool
from atoll.service.templates.build_inputs import BuildInputs
from atoll.service.templates.build_logs import BuildLogs
from atoll.service.templates.builds import Builds
from atoll.service.templates.service import Templates
from atoll.service.volumes.service import Volumes

if TYPE_CHECKING:
    from atoll.app.backends import Backends

MAX_POOL_AGE = timedelta(days=7)
"""
Time in a pool that the validity of an instance's callback token covers, in addition to the lifetime
of its session.
"""


@dataclass(frozen=True)
class ComputeGroup:
    feed: Feed
    build_inputs: BuildInputs
    templates: Templates
    tokens: ExecutorTokens | None
    pool: Pool
    instance_maker: InstanceMaker
    packages: Packages
    builds: Builds
    checkpoints: Checkpoints
    volumes: Volumes
    admission: Admission


def compute_group(backends: Backends) -> ComputeGroup:
    settings, driver, blobs = backends.settings, backends.driver, backends.blobs
    replica = backends.replica
    store, leases, clock, node_id = replica.store, replica.leases, replica.clock, replica.node_id
    feed = Feed(store, replica.coordination, clock)
    store.subscribe(feed)
    build_inputs = BuildInputs(blobs, backends.encryption)
    templates = Templates(replica, driver, build_inputs, BuildLogs(blobs), feed, settings)
    packages = Packages(driver, leases, clock, settings.packages, backends.secret, node_id)
    builds = Builds(replica, driver, templates, packages, settings.template)
    tokens = _executor_tokens(backends)
    callback = None if tokens is None else _Callbacks(tokens, settings.link.callback_url)
    pool = Pool(replica, driver)
    maker = InstanceMaker(
        replica, driver, builds, pool.stats, ephemeral=backends.embedded, callback=callback
    )
    templates.subscribe(pool)
    volumes = Volumes(store, driver, blobs, clock, settings.session, node_id)
    checkpoints = Checkpoints(replica, blobs, volumes, backups=settings.workspace.backups)
    admission = Admission(store, clock, settings.node, node_id)
    return ComputeGroup(
        feed,
        build_inputs,
        templates,
        tokens,
        pool,
        maker,
        packages,
        builds,
        checkpoints,
        volumes,
        admission,
    )


def _executor_tokens(backends: Backends) -> ExecutorTokens | None:
    """Null where executors do not report to a callback address."""
    settings = backends.settings
    if backends.embedded or settings.link.callback_url is None:
        return None
    lifetime = settings.session.max_timeout + MAX_POOL_AGE
    return ExecutorTokens(backends.secret, backends.replica.clock, lifetime)


class _Callbacks:
    """The callback address of an instance, with its token."""

    def __init__(self, tokens: ExecutorTokens, url: str | None) -> None:
        assert url is not None
        self._tokens = tokens
        self._url = url

    def __call__(self, instance_id: str) -> Callback:
        return Callback(self._url, self._tokens.make(instance_id))
