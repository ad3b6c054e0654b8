"""The package environments of a node, which may have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import PermanentError

if TYPE_CHECKING:
    from atoll.drivers.base import Driver, PackageEnvironments


def require_packages(driver: Driver) -> PackageEnvironments:
    """Raises `PermanentError` with code `packages_not_configured` if the node has none."""
    if driver.packages is None:
        reason = driver.capabilities.unavailable["packages"]
        raise PermanentError(
            f"Packages cannot be installed on this node: {reason}. Use an image that has them.",
            code="packages_not_configured",
        )
    return driver.packages
