"""
Workspaces of a cluster: directories of pods, which end with them.

They have no life of their own, so none is listed, copied or discarded. What is to outlive its pod
is in a checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atoll.model.instance import Handle


class KubernetesWorkspaces:
    can_copy = False
    outlive_instances = False

    def of(self, handle: Handle) -> str:
        return str(handle.data["workspace"])

    async def names(self) -> list[str]:
        return []

    async def copy(self, name: str, new: str) -> bool:
        return False

    async def discard(self, name: str) -> None: ...
