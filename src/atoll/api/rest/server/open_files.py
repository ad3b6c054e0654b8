"""How many files and connections this process may have open."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.settings import ConnectionSettings

RESERVE = 32
"""Connections beyond the limit, for health checks."""
MAX_OPEN_FILES = 1 << 20
"""Upper bound of the soft limit: some programs loop over all possible descriptors."""


def raise_open_files() -> None:
    """Raise the soft limit of open files to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def connection_limit(settings: ConnectionSettings) -> int:
    """Connections of one process: half of its descriptors; the rest is for sessions and files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return settings.max_connections
    return max(1, min(settings.max_connections, soft // 2 - RESERVE))
