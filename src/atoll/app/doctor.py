"""What `atoll doctor` reports of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.drivers.local import cgroup_delegation, host_checks
from atoll.drivers.local.doctor_advice import without_root
from atoll.drivers.shared.data_directories import NODE_DIRECTORY

if TYPE_CHECKING:
    from atoll.drivers.local.host_checks import Check
    from atoll.settings import Settings


def doctor(settings: Settings) -> list[Check]:
    return host_checks.checks(settings.local, settings.data_dir / NODE_DIRECTORY)


def advice(settings: Settings, checks: list[Check]) -> tuple[str, list[tuple[str, str]]]:
    """What an ordinary user lacks, as a paragraph, and the ways to get it."""
    return without_root(checks, *cgroup_delegation.possible(settings.local))
