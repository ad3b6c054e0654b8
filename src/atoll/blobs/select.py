"""Selects the blob store that the settings name. It is opened by the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.blobs.local import LocalBlobs
from atoll.blobs.s3 import S3Blobs
from atoll.blobs.spool import Spool

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.settings import Settings

SPOOLED_PREFIXES = ("executions/", "workspaces/", "requests/")
"""Blobs beneath these are spooled while S3 is unavailable: clients rely on them."""


def select_blobs(settings: Settings, clock: Clock) -> LocalBlobs | Spool:
    if settings.blob.url is None:
        return LocalBlobs(settings.data_dir / "blobs")
    spool = settings.data_dir / "spool"
    return Spool(S3Blobs(settings.blob), spool, settings.blob, clock, prefixes=SPOOLED_PREFIXES)
