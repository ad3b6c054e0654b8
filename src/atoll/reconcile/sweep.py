"""The loop of a sweep: something is done once in a while, and whatever happens, again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

import structlog

from atoll.errors import TemporaryError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.service.leases import Leases

log = structlog.get_logger(__name__)


async def sweep(event: str, pause: float, once: Callable[[], Awaitable[None]]) -> NoReturn:
    """`event` is what is logged when a turn fails; `pause` is seconds between two."""
    while True:
        await asyncio.sleep(pause)
        try:
            await once()
        except TemporaryError as error:
            log.warning(event, code=error.code, error=error.message)
        except Exception as error:
            log.error(event, exc_info=error)


async def alone(leases: Leases, key: str, once: Callable[[], Awaitable[None]]) -> None:
    """Do it unless another replica is at it."""
    lease = await leases.try_lease(key)
    if lease is not None:
        async with lease:
            await once()
