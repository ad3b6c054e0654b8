"""Pauses, resumes and resizes instances, where the node's driver can do that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import Conflict

if TYPE_CHECKING:
    from atoll.drivers.base import Driver, Pausing
    from atoll.model.instance import Handle
    from atoll.model.resources import Resources


def require_pausing(driver: Driver) -> Pausing:
    """Raises `Conflict` with code `pause_unavailable` if the node cannot pause instances."""
    if driver.pausing is None:
        reason = driver.capabilities.unavailable["pausing"]
        raise Conflict(
            f"This node cannot pause instances: {reason}. Stop the session instead.",
            code="pause_unavailable",
        )
    return driver.pausing


async def resume_instance(driver: Driver, handle: Handle) -> None:
    """Resume an instance, if it is paused."""
    if driver.pausing is not None:
        await driver.pausing.resume(handle)


async def resize_instance(driver: Driver, handle: Handle, resources: Resources) -> bool:
    """Change the limits of a running instance; False if that takes a new instance."""
    return driver.resizing is not None and await driver.resizing.resize(handle, resources)
