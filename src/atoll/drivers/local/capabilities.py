"""What this machine provides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.model.instance import Capabilities
from atoll.model.template import REQUIREMENTS

if TYPE_CHECKING:
    from atoll.drivers.shared.cgroups import ControlGroups


def find_capabilities(
    groups: ControlGroups, *, own_uids: bool, no_images: str | None, seccomp: bool
) -> Capabilities:
    """`no_images` says why file system images cannot be mounted."""
    has = {"own_uid": own_uids, "disk_quota": no_images is None, "seccomp": seccomp}
    has["no_network"] = True  # Each instance has an empty network namespace.
    provides = groups.provides | {name for name, provided in has.items() if provided}
    missing = {name: text for name, text in REQUIREMENTS.items() if name not in provides}
    if no_images is not None:
        missing["disk_quota"] += f": {no_images}"
    unavailable = {} if groups.freezes else {"pausing": "it has no freezer for control groups"}
    return Capabilities(frozenset(provides), missing, unavailable)
