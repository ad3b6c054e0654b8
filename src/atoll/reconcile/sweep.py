"""Loops that repeat a function for ever and survive its failures."""

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

RETRY_DELAY = 1.0
"""Longest pause in seconds after a failure of a loop that waits for notifications."""

LISTEN_TIMEOUT = 60.0
"""Seconds that a loop without a pause of its own waits for a notification at a time."""


async def sweep(
    event: str, pause: float, once: Callable[[], Awaitable[None]], *, at_once: bool = False
) -> NoReturn:
    """
    Call `once` every `pause` seconds, for the first time after a pause unless `at_once`. `event` is
    logged when a call fails.
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
    """The same at once, after each notification, and after `pause` seconds without one."""
    while True:
        try:
            async with coordination.listen(topic) as subscription:
                while True:
                    await once()
                    await subscription.wait(pause)
        except TemporaryError as error:
            log.warning(event, code=error.code, error=error.message)
        except Exception as error:
            log.error(event, exc_info=error)
        raise_if_cancelled()
        await asyncio.sleep(min(pause, RETRY_DELAY))


async def on_notify(
    event: str,
    coordination: Coordination,
    topic: str,
    call: Callable[[], None],
    *,
    on_error: Callable[[], None] | None = None,
) -> NoReturn:
    """
    Call `call` after each notification, and after each new subscription, before which some may have
    been missed; call `on_error` while notifications cannot arrive.
    """
    while True:
        try:
            async with coordination.listen(topic) as subscription:
                call()
                while True:
                    if await subscription.wait(LISTEN_TIMEOUT):
                        call()
        except Exception as error:
            known = isinstance(error, TemporaryError)
            log.warning(event, error=str(error), exc_info=None if known else error)
        raise_if_cancelled()
        if on_error is not None:
            on_error()
        await asyncio.sleep(RETRY_DELAY)


async def exclusively(leases: Leases, key: str, once: Callable[[], Awaitable[None]]) -> None:
    """Call `once` unless another replica holds the lease."""
    lease = await leases.try_lease(key)
    if lease is not None:
        async with lease:
            await once()
