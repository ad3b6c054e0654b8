"""Host uids: each workspace and each installation has one of its own, which owns its files."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.settings import LocalSettings


def uid_range(settings: LocalSettings) -> range:
    return range(settings.uid_base, settings.uid_base + settings.uid_count)


def new_uid(uids: range) -> int:
    return secrets.choice(uids)
