"""What every driver does with a link to an executor: prepare it for user code, and shut it down."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from atoll.drivers.shared.zygote_confinement import ZygoteConfinement
from atoll.errors import AtollError, PermanentError

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from datetime import timedelta

    from atoll.drivers.shared.cgroups import ControlGroups
    from atoll.link.client import Link


async def release_zygote(link: Link, groups: ControlGroups, instance_id: str) -> None:
    """Confine the zygote and let it run user code. Raises `PermanentError` if it cannot preload."""
    failed = await ZygoteConfinement(groups, instance_id, link).settle()
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
        raise PermanentError(f"Preloading failed: {reasons}", code="preload_failed")


async def shut_down(connecting: Awaitable[Link], grace: timedelta) -> None:
    """Ask an executor to shut down and wait for that. Errors are ignored: it is killed next."""
    with contextlib.suppress(AtollError, TimeoutError):
        async with asyncio.timeout(grace.total_seconds()):
            link = await connecting
            try:
                await link.call("shutdown")
                await link.closed
            finally:
                link.close()
