"""What this node reports about itself: load, capabilities, cached templates, and problems."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import TemporaryError
from atoll.model.node import Node, versioned_name
from atoll.model.placement import MOUNT
from atoll.model.session import COUNTED_ON_NODE
from atoll.model.template import TemplateStatus

if TYPE_CHECKING:
    from atoll.drivers.base import Driver
    from atoll.model.node import NodeMetrics
    from atoll.model.template import Template
    from atoll.service.pool.service import Pool
    from atoll.service.replica import Replica
    from atoll.service.templates.builds import Builds
    from atoll.settings import Settings

METRICS_SECONDS = 1.0
"""How long measured load is reused: CPU load is a difference over time."""
TEMPLATES_SECONDS = 60.0
"""How long the list of cached templates is reused; the driver does not report removals."""
MAX_TEMPLATES = 500
"""Cached templates that a node reports, newest first."""
PAGE = 100


class LocalNode:
    def __init__(
        self,
        replica: Replica,
        driver: Driver,
        builds: Builds,
        pool: Pool,
        settings: Settings,
        url: str,
    ) -> None:
        """`url` is the address of this replica, unless the settings name another."""
        self.id = replica.node_id
        self._store = replica.store
        self._clock = replica.clock
        self._driver = driver
        self._builds = builds
        self._pool = pool
        self._settings = settings
        self._url = settings.node.url or url
        self._metrics: tuple[float, NodeMetrics] | None = None
        self._templates: tuple[float, tuple[str, ...]] | None = None

    async def describe(self) -> Node:
        """This node at this moment, without what other nodes observe of it."""
        capabilities = self._driver.capabilities
        metrics = await self._measure()
        counts = [
            await self._store.sessions.count(status, node_id=self.id) for status in COUNTED_ON_NODE
        ]
        return Node(
            id=self.id,
            type=self._driver.kind,
            url=self._url,
            labels=self._settings.node.labels,
            provides=capabilities.provides | _features(self._driver),
            missing=capabilities.missing,
            max_sessions=self._settings.node.max_sessions or self._capacity(metrics),
            metrics=metrics,
            sessions=sum(counts),
            templates=await self._cached_templates(),
            building=tuple(versioned_name(*key) for key in self._builds.building),
            pool=await self._pool.on_node(),
            shared_blobs=self._settings.blob.url is not None,
            seen_at=self._clock.now(),
            problem=await self.problem(),
        )

    async def problem(self) -> str | None:
        """Why this node cannot work at the moment; null if it can."""
        if self._store.unavailable:
            return "its control plane does not reach the database"
        return (await self._driver.status()).problem

    def templates_changed(self) -> None:
        self._templates = None

    def _capacity(self, metrics: NodeMetrics) -> int:
        """How many sessions of default size fit into the memory."""
        return max(1, metrics.mem_total // self._settings.session.memory)

    async def _measure(self) -> NodeMetrics:
        now = self._clock.monotonic()
        if self._metrics is None or now - self._metrics[0] >= METRICS_SECONDS:
            self._metrics = (now, (await self._driver.status()).load)
        return self._metrics[1]

    async def _cached_templates(self) -> tuple[str, ...]:
        """Templates of which this node has everything that instances need."""
        now = self._clock.monotonic()
        if self._templates is not None and now - self._templates[0] < TEMPLATES_SECONDS:
            return self._templates[1]
        found: list[str] = []
        environments: set[str] | None = None
        cursor: str | None = None
        while len(found) < MAX_TEMPLATES:
            page = await self._store.templates.page(cursor=cursor, limit=PAGE)
            for newest in page.items:
                template = await self._ready_version(newest)
                if template is None:
                    continue
                if template.build is not None and environments is None:
                    environments = await self._environments()
                try:
                    cached = await self._is_cached(template, environments or set())
                except TemporaryError:
                    # `problem` reports it, and the rest of the report is still true.
                    return () if self._templates is None else self._templates[1]
                if cached:
                    found.append(versioned_name(template.id, template.number))
            cursor = page.next_cursor
            if cursor is None:
                break
        self._templates = (now, tuple(found[:MAX_TEMPLATES]))
        return self._templates[1]

    async def _environments(self) -> set[str]:
        packages = self._driver.packages
        listed = [] if packages is None else await packages.listed()
        return {info.name for info in listed}

    async def _ready_version(self, newest: Template) -> Template | None:
        if newest.status is TemplateStatus.READY:
            return newest
        return await self._store.templates.ready(newest.id)

    async def _is_cached(self, template: Template, environments: set[str]) -> bool:
        build = template.build
        if build is None:
            # On a node with images, a template that names none uses the node's default image.
            has_image = self._driver.images.image_layer(template) is not None
            return not has_image or await self._driver.images.is_built(template)
        if build.environment is not None and build.environment not in environments:
            return False
        return not build.layers or await self._driver.images.is_built(template)


def _features(driver: Driver) -> frozenset[str]:
    """Names of `instance.FEATURES` and of mounts that the node's driver has."""
    has = {
        "pause": driver.pausing is not None,
        "copy": driver.workspaces.can_copy,
        MOUNT: driver.volumes is not None and driver.volumes.bucket_problem() is None,
    }
    return driver.images.features | {name for name, there in has.items() if there}
