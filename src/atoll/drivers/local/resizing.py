"""Changes the limits of running instances."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from atoll.drivers.shared.workspace_files import IMAGE

if TYPE_CHECKING:
    from atoll.drivers.shared.cgroups import ControlGroups
    from atoll.drivers.shared.workspace_files import WorkspaceFiles
    from atoll.model.instance import Handle
    from atoll.model.resources import Resources


class LocalResizing:
    def __init__(self, groups: ControlGroups, workspaces: WorkspaceFiles) -> None:
        self._groups = groups
        self._workspaces = workspaces

    async def resize(self, handle: Handle, resources: Resources) -> bool:
        workspace = await asyncio.to_thread(self._workspaces.get, str(handle.data["workspace"]))
        if workspace is None or (workspace.kind == IMAGE and workspace.size != resources.disk):
            return False
        if resources.disk > workspace.size:
            return False  # The limit of a file's size was set when the instance started.
        await asyncio.to_thread(self._groups.limit, handle.instance_id, resources)
        return True
