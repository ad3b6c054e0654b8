"""
Artifacts of a session: the newest version of each path, over all its executions, in order of path.

Memory is bounded by the page. Time grows with the executions, of which the newest `MAX_EXECUTIONS`
are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll.model.page import Page
from atoll.service import cursors

if TYPE_CHECKING:
    from atoll.model.execution import Artifact
    from atoll.service.sessions.access import SessionAccess
    from atoll.stores.base import Store

MAX_EXECUTIONS = 10_000
BATCH = 100
"""Executions that are read at once."""


@dataclass(frozen=True, slots=True)
class ArtifactVersion:
    """An artifact, and the execution that wrote it last."""

    execution_id: str
    artifact: Artifact


class Artifacts:
    def __init__(self, store: Store, sessions: SessionAccess) -> None:
        self._store = store
        self._sessions = sessions

    async def page(
        self, session_id: str, *, cursor: str | None, limit: int
    ) -> Page[ArtifactVersion]:
        await self._sessions.records.get(session_id)
        after = cursors.decode("a", cursor)
        found: dict[str, ArtifactVersion] = {}
        following: str | None = None
        for _ in range(MAX_EXECUTIONS // BATCH):
            page = await self._store.executions.page(
                session_id=session_id, cursor=following, limit=BATCH
            )
            for execution in page.items:
                if execution.outcome is None:
                    continue
                for artifact in execution.outcome.artifacts:
                    if after is None or artifact.path > after:
                        # Newest first: older versions are skipped.
                        found.setdefault(artifact.path, ArtifactVersion(execution.id, artifact))
                if len(found) > 2 * limit:
                    # A path beyond the page stays beyond it.
                    found = {path: found[path] for path in sorted(found)[: limit + 1]}
            following = page.next_cursor
            if following is None:
                break
        chosen = sorted(found)
        items = tuple(found[path] for path in chosen[:limit])
        last = chosen[limit - 1] if len(chosen) > limit else None
        return Page(items, cursors.encode("a", last))
