"""Where the settings keep blobs. Nothing is opened before the first call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.blobs.objects import LocalObjects
from atoll.blobs.s3 import S3Objects
from atoll.blobs.spool import Spool

if TYPE_CHECKING:
    from atoll.clock import Clock
    from atoll.settings import Settings

KEPT = ("executions/", "workspaces/", "requests/")
"""Beneath these, what cannot be put waits on the node: somebody was told that it is safe."""


def choose(settings: Settings, clock: Clock) -> LocalObjects | Spool:
    if settings.blob.url is None:
        return LocalObjects(settings.data_dir / "blobs")
    spool = settings.data_dir / "spool"
    return Spool(S3Objects(settings.blob), spool, settings.blob, clock, prefixes=KEPT)
