"""What `atoll doctor` reports of this machine, or of a cluster."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from atoll.drivers.local import cgroup_delegation, host_checks
from atoll.drivers.local.doctor_advice import without_root
from atoll.drivers.shared.data_directories import NODE_DIRECTORY

if TYPE_CHECKING:
    from atoll.drivers.shared.checks import Check
    from atoll.settings import Settings


def machine(settings: Settings) -> list[Check]:
    return host_checks.checks(settings.local, settings.data_dir / NODE_DIRECTORY)


def cluster(settings: Settings) -> list[Check]:
    # Only here: its HTTP client takes time to import.
    from atoll.drivers.kubernetes import cluster_checks

    return asyncio.run(cluster_checks.checks(settings))


def advice(settings: Settings, checks: list[Check]) -> tuple[str, list[tuple[str, str]]]:
    """What an ordinary user lacks, as a paragraph, and the ways to get it."""
    return without_root(checks, *cgroup_delegation.possible(settings.local))
