"""
Checkpoints on request: `POST sessions/{id}/checkpoint`, and those that other sessions start from.
`autosave.py` takes the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from atoll.errors import CheckpointNotFound, Conflict, NodeUnreachable
from atoll.model.session import SessionStatus, WorkspaceMode

if TYPE_CHECKING:
    from atoll.model.checkpoint import Checkpoint
    from atoll.model.session import Session
    from atoll.service.sessions.archive import Archiver
    from atoll.service.sessions.autosave import Autosave
    from atoll.service.sessions.core import SessionCore
    from atoll.service.sessions.start import SessionStarter


class RemoteCheckpoints(Protocol):
    """Other nodes, which take checkpoints of the sessions that they host."""

    async def save(self, session: Session) -> None:
        """Have the session's node take a checkpoint, if that can be reached."""


class CheckpointRequests:
    def __init__(
        self,
        core: SessionCore,
        starter: SessionStarter,
        archiver: Archiver,
        autosave: Autosave,
        elsewhere: RemoteCheckpoints,
        *,
        has_remote: bool,
    ) -> None:
        """`has_remote` is False if blobs are on the node's own disk."""
        self._records = core.records
        self._checkpoints = core.checkpoints
        self._starter = starter
        self._archiver = archiver
        self._autosave = autosave
        self._elsewhere = elsewhere
        self._has_remote = has_remote

    async def take(self, session_id: str) -> Checkpoint | None:
        """Take a checkpoint now; None if the workspace is empty and always was."""
        connection = await self._starter.connect(session_id)
        if connection.session.workspace_mode is not WorkspaceMode.SYNC:
            raise Conflict(
                f"The workspace of session {session_id} is in the blob store already.",
                code="workspace_mounted",
            )
        return await self._autosave.checkpoint(connection)

    async def ensure(self, session_id: str) -> None:
        """Have a checkpoint of the session's current files, for another session to start from."""
        session = await self._records.get(session_id)
        if session.rested_at is not None and not session.status.ended:
            # Files of an archived session have not changed since its checkpoint.
            if not self._has_remote or not await self._was_taken_at_stop(session):
                await self._archiver.checkpoint_stopped(session_id)
        elif not session.status.ended:
            try:
                await self.take(session_id)
            except NodeUnreachable:
                # If its node cannot be reached either, the last checkpoint is used.
                await self._elsewhere.save(session)
        await self._autosave.wait_for_last_checkpoint(session_id)
        if await self._checkpoints.get(session_id) is None:
            raise CheckpointNotFound(f"Session {session_id} left no files.")

    async def _was_taken_at_stop(self, session: Session) -> bool:
        """A stop does not wait for a failing checkpoint."""
        if session.status is not SessionStatus.STOPPED or session.rested_at is None:
            return True
        last = await self._checkpoints.get(session.id)
        return last is not None and last.created_at >= session.rested_at
