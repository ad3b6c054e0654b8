"""Opens the coordination that the settings name, and announces what other replicas have to know."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from atoll import ids
from atoll.coordination.memory import MemoryCoordination
from atoll.errors import TemporaryError
from atoll.service.executions.runner import LEAVING
from atoll.service.sessions.service import settle_topic

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.coordination.base import Coordination
    from atoll.settings import Settings


log = structlog.get_logger(__name__)


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


async def wake_node(coordination: Coordination, node_id: str) -> None:
    try:
        await coordination.notify(settle_topic(node_id))
    except TemporaryError as error:
        # Its sweep finds them.
        log.info("node.not_woken", node_id=node_id, error=error.message)


async def announce_departure(coordination: Coordination) -> None:
    """Tell the others that this replica ends, so that they take over what it had at once."""
    await coordination.shutdown()
    try:
        await coordination.notify(LEAVING)
    except TemporaryError as error:
        log.info("replica.left_unheard", error=error.message)
