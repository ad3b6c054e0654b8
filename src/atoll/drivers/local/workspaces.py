"""Workspaces of this machine's instances: listed, copied and discarded."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING

from atoll.drivers.shared import processes
from atoll.drivers.shared.cancellation import run_until_abandoned
from atoll.drivers.shared.workspace_files import IMAGE
from atoll.errors import NodeFull, TemporaryError
from atoll.model.instance import State

if TYPE_CHECKING:
    import threading

    from atoll.drivers.local.handle_files import HandleFiles
    from atoll.drivers.local.instance_state import InstanceStates
    from atoll.drivers.shared.workspace_files import Workspace, WorkspaceFiles
    from atoll.model.instance import Handle


class LocalWorkspaces:
    can_copy = True

    outlive_instances = True

    def __init__(self, files: WorkspaceFiles, handles: HandleFiles, states: InstanceStates) -> None:
        self._files = files
        self._handles = handles
        self._states = states

    def of(self, handle: Handle) -> str:
        return str(handle.data["workspace"])

    async def names(self) -> list[str]:
        return await asyncio.to_thread(self._files.names)

    async def discard(self, name: str) -> None:
        await asyncio.to_thread(self._files.remove, name)

    async def copy(self, name: str, new: str) -> bool:
        return await run_until_abandoned(lambda abandoned: self._copy(name, new, abandoned))

    def _copy(self, name: str, new: str, abandoned: threading.Event) -> bool:
        source = self._files.get(name)
        if source is None:
            return False
        try:
            self._flush(source)
            return self._files.copy(source, new, abandoned)
        except OSError as error:
            message = f"Workspace {name} could not be copied: {error}."
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NodeFull(message) from error
            raise TemporaryError(message, code="workspace_not_copied") from error

    def _flush(self, workspace: Workspace) -> None:
        """Ensure that all that was written to a workspace is in its files or its image."""
        for handle in self._handles.all():
            if self.of(handle) != workspace.name:
                continue
            state = self._states.observe_now(handle).state
            if state is State.RUNNING:
                raise TemporaryError(
                    f"Workspace {workspace.name} is in use by instance {handle.instance_id}, which "
                    "is not paused.",
                    code="workspace_busy",
                )
            if state is State.PAUSED:
                if workspace.kind == IMAGE:
                    processes.sync_files(int(handle.data["child"]), "workspace")
                return
        self._files.wait_until_unmounted(workspace)
