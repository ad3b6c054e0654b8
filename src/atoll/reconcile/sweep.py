"""The loops of sweeps: something is done once in a while, and whatever happens, again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

import structlog

from atoll.errors import TemporaryError
from atoll.reconcile.loop import raise_if_cancelled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from atoll.coordination.base import Coordination
    from atoll.coordination.leases import Leases

log = structlog.get_logger(__name__)

AGAIN_SECONDS = 1.0
"""Longest pause after a turn that failed, where one is told what there is to do."""


async def sweep(
    event: str, pause: float, once: Callable[[], Awaitable[None]], *, at_once: bool = False
) -> NoReturn:
    """
    `event` is what is logged when a turn fails; `pause` is seconds between two, and before the
    first unless that is `at_once`.
    """
    while True:
        if not at_once:
            await asyncio.sleep(pause)
        at_once = False
        try:
            await once()
        except TemporaryError as error:
            log.warning(event, code=error.code, error=error.message)
        except Exception as error:
            log.error(event, exc_info=error)
        raise_if_cancelled()


async def sweep_on_notify(
    event: str,
    coordination: Coordination,
    topic: str,
    pause: float,
    once: Callable[[], Awaitable[None]],
) -> NoReturn:
    """The same at once, whenever the topic is told, and after so many seconds without that."""
    while True:
        try:
            async with coordination.listen(topic) as heard:
                while True:
                    await once()
                    await heard.wait(pause)
        except TemporaryError as error:
            log.warning(event, code=error.code, error=error.message)
        except Exception as error:
            log.error(event, exc_info=error)
        raise_if_cancelled()
        await asyncio.sleep(min(pause, AGAIN_SECONDS))


async def exclusively(leases: Leases, key: str, once: Callable[[], Awaitable[None]]) -> None:
    """Do it unless another replica is at it."""
    lease = await leases.try_lease(key)
    if lease is not None:
        async with lease:
            await once()
