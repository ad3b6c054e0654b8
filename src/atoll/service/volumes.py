"""Volumes: files that several sessions share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.errors import InvalidRequest
from atoll.model.session import WorkspaceMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.model.volume import VolumeMount


class Volumes:
    async def check(self, mounts: Sequence[VolumeMount], mode: WorkspaceMode) -> None:
        """Whether a session on this node can have them, and its workspace in that mode."""
        if mounts or mode is not WorkspaceMode.SYNC:
            raise InvalidRequest("volumes: not available.", field="volumes")
